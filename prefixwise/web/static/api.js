/** The server, over HTTP. The API key is held by this module, in memory, and nowhere else. */

let apiKey = "";
let keysGiven = 0;

export function setKey(key) {
  apiKey = key.trim();
  keysGiven += 1;
}

/** The number of keys entered so far: after a refusal, wait for the next key. */
export const numKeys = () => keysGiven;

/** A response other than 200: the API's message, and the field that it names. */
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null }) {
    super(message);
    this.status = status;
    this.param = status === 401 ? "api_key" : param;
    this.code = code;
  }
}

/** Send a request of request.js; the decoded answer. */
export async function send(request, signal) {
  const response = await call(request.path, {
    method: "POST",
    body: JSON.stringify(request.body),
    headers: { "Content-Type": "application/json" },
    signal,
  });
  return response.json();
}

export const getJson = async (path) => (await call(path, {})).json();
export const getText = async (path, signal) => (await call(path, { signal })).text();

/** Send a file's text, get text. */
export async function postText(path, text) {
  return (await call(path, { method: "POST", body: text })).text();
}

async function call(path, options) {
  const headers = { ...options.headers, ...(apiKey ? { Authorization: `Bearer ${apiKey}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) throw new ApiError(response.status, await readError(response));
  return response;
}

async function readError(response) {
  const fallback = { message: `the server answered ${response.status}` };
  try {
    return { ...fallback, ...(await response.json()).error };
  } catch {
    return fallback;
  }
}
