// Starts Swagger UI on the API's page. The files of Swagger UI come from the package flask-swagger-ui.
"use strict";

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function followScheme() {
  document.documentElement.classList.toggle("dark-mode", dark.matches);
}

dark.addEventListener("change", followScheme);
followScheme();

const ownParts = ({ React }) => ({
  components: {
    // Its own is a link within the button that opens an operation: one control within another.
    DeepLink: ({ text }) => React.createElement("span", null, text),
    InfoContainer: () => null, // the page has a heading
  },
});

// The navigation: every operation below its group, as the document has them.
async function listOperations() {
  const { info, paths } = await (await fetch("/openapi.json")).json();
  document.getElementById("version").textContent = info.version;
  const groups = new Map();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, { tags, operationId, summary }] of Object.entries(methods)) {
      const entries = groups.get(tags[0]) ?? groups.set(tags[0], []).get(tags[0]);
      entries.push({ path, method, summary, id: `operations-${tags[0].replaceAll(" ", "_")}-${operationId}` });
    }
  }
  for (const [name, entries] of groups) {
    const list = document.createElement("ul");
    list.append(...entries.map(operationLink));
    const heading = document.createElement("h2");
    heading.textContent = name;
    document.getElementById("operation-list").append(heading, list);
  }
}

function operationLink({ path, method, summary, id }) {
  const link = document.createElement("a");
  link.href = `#${id}`;
  link.title = summary;
  const verb = document.createElement("span");
  verb.className = "verb";
  verb.textContent = method.toUpperCase();
  link.append(verb, ` ${path}`);
  link.addEventListener("click", (event) => {
    event.preventDefault(); // the part after the # is Swagger UI's
    showOperation(id);
  });
  const entry = document.createElement("li");
  entry.append(link);
  return entry;
}

function showOperation(id) {
  const block = document.getElementById(id);
  const button = block.querySelector(".opblock-summary-control");
  if (button.getAttribute("aria-expanded") !== "true") button.click();
  button.focus({ preventScroll: true });
  block.scrollIntoView({ block: "start" });
}

// On a phone the list would stand before everything else.
document.getElementById("contents").open = window.matchMedia("(min-width: 900px)").matches;
listOperations();

window.SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0, // the schemas are closed: they are most of the page's length
  plugins: [ownParts],
  validatorUrl: null, // the default asks another host
});
