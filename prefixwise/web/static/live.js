/** The live metrics: read from /metrics every second while the page is visible. */
import { getText, numKeys } from "./api.js";
import { byId, shortNumber } from "./dom.js";

const EVERY_MS = 1000;
const ANSWER_MS = 10_000; // then a question without an answer is given up

/** Start; runs until the page is closed. */
export function startLiveMetrics() {
  let before = null;
  let refusedAt = -1; // the number of keys entered when the server last refused
  let isAsking = false; // a slow server is asked once at a time
  async function look() {
    if (isAsking || refusedAt === numKeys()) return;
    if (document.visibilityState !== "visible") {
      before = null;
      return;
    }
    isAsking = true;
    const keys = numKeys();
    try {
      const text = await getText("/metrics", AbortSignal.timeout(ANSWER_MS));
      const now = { at: performance.now(), ...readMetrics(text) };
      show(now, before);
      before = now;
    } catch (error) {
      if (error.status === 401) refusedAt = keys;
      before = null;
      show(null, null);
    } finally {
      isAsking = false;
    }
  }
  look();
  setInterval(look, EVERY_MS);
  document.addEventListener("visibilitychange", look);
}

/** Metrics without labels, by name, from Prometheus' text format. */
export function readMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^prefixwise:(\w+) ([-+.\deE]+)$/.exec(line);
    if (match) found[match[1]] = Number(match[2]);
  }
  return found;
}

function show(now, before) {
  const put = (id, value) => {
    byId(id).textContent = value === null || !Number.isFinite(value) ? "–" : shortNumber(value);
  };
  const seconds = now && before ? (now.at - before.at) / 1000 : 0;
  const rate = seconds ? (now.items_scored_total - before.items_scored_total) / seconds : null;
  put("live-items", rate === null ? null : Math.round(rate));
  put("live-running", now?.requests_running ?? null);
  put("live-waiting", now?.requests_waiting ?? null);
  const queried = now?.prefix_cache_queried_tokens_total;
  byId("live-hits").textContent = queried
    ? `${Math.round((100 * now.prefix_cache_hit_tokens_total) / queried)} %` : "–";
}
