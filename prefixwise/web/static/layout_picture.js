/**
 * The attention layout as a picture: a query token's row is filled where it sees a key token's column. Drawn from the
 * plan (`debug.layout`).
 */
import { svgElement } from "./dom.js";

const SIZE = 600;
const LEAST_ITEM = 5; // pixels of the smallest item that is drawn
const MOST_PREFIX = 0.5; // of the picture's side, whatever the prefix's length

/** The runs of segments that share one prefix: the plan's packed sequences, or all segments of a cached prefix. */
function runsOf(layout) {
  const shown = layout.tail_lens.length;
  if (!layout.rows.length) return [[0, shown]];
  return layout.rows.map(([first, stop]) => [first, Math.min(stop, shown)]).filter(([first, stop]) => first < stop);
}

/** Parts along the diagonal: `{segment, size}`, where the segment is null for a prefix. */
function partsOf(layout) {
  return runsOf(layout).flatMap(([first, stop], run) => {
    const items = Array.from({ length: stop - first }, (_, i) => (
      { segment: first + i, run, tokens: layout.tail_lens[first + i], reads: layout.prefix_lens[first + i] }
    ));
    return layout.prefix_tokens ? [{ segment: null, run, tokens: layout.prefix_tokens, reads: 0 }, ...items] : items;
  });
}

/** As many parts as can be distinguished, and the pixels per token; a long prefix is drawn shorter. */
function fit(parts) {
  for (let count = parts.length; count >= 1; count -= 1) {
    const drawn = parts.slice(0, count);
    const items = drawn.filter((part) => part.segment !== null);
    const tokens = items.reduce((sum, part) => sum + part.tokens, 0);
    const prefixes = drawn.filter((part) => part.segment === null);
    const all = tokens + prefixes.reduce((sum, part) => sum + part.tokens, 0);
    const prefixShare = Math.min(MOST_PREFIX, all ? 1 - tokens / all : 0);
    const scale = tokens ? (SIZE * (1 - prefixShare)) / tokens : 0;
    const smallest = Math.min(...items.map((part) => part.tokens)) * scale;
    if (count <= 2 || smallest >= LEAST_ITEM) {
      const prefixSize = prefixes.length ? (SIZE * (items.length ? prefixShare : 1)) / prefixes.length : 0;
      return { drawn, scale, prefixSize };
    }
  }
  return { drawn: [], scale: 0, prefixSize: 0 };
}

/** `{picture, numItems}`: the picture, and how many items are in it. */
export function layoutPicture(layout, chosenItem) {
  const { drawn, scale, prefixSize } = fit(partsOf(layout));
  const shapes = [];
  let at = 0;
  let prefixAt = 0;
  for (const part of drawn) {
    const size = part.segment === null ? prefixSize : part.tokens * scale;
    const isChosen = part.segment !== null && Math.floor(part.segment / layout.segments_per_item) === chosenItem;
    const mark = isChosen ? " chosen-item" : "";
    if (part.segment === null) prefixAt = at;
    else if (part.reads) {
      const width = (prefixSize * part.reads) / layout.prefix_tokens;
      shapes.push(svgElement("rect", { class: `reads${mark}`, x: prefixAt, y: at, width, height: size }));
    }
    const kind = part.segment === null ? "prefix" : `own${mark}`;
    shapes.push(svgElement("path", { class: kind, d: `M${at} ${at}V${at + size}H${at + size}Z` }));
    at += size;
  }
  const items = new Set(drawn.filter((part) => part.segment !== null)
    .map((part) => Math.floor(part.segment / layout.segments_per_item)));
  const picture = svgElement("svg", { class: "picture", viewBox: `-1 -1 ${SIZE + 2} ${SIZE + 2}`, role: "img" },
    svgElement("title", {}, describe(layout, items.size)), ...shapes,
    svgElement("rect", { class: "frame", x: 0, y: 0, width: SIZE, height: SIZE }));
  return { picture, numItems: items.size };
}

function describe(layout, numItems) {
  return `Attention layout: a prefix of ${layout.prefix_tokens} tokens and ${numItems} items. `
    + "Every item sees the prefix and itself, and no other item.";
}
