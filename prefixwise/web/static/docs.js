// Starts Swagger UI on the API's page. The files of Swagger UI come from the package flask-swagger-ui.
"use strict";

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function followScheme() {
  document.documentElement.classList.toggle("dark-mode", dark.matches);
}

dark.addEventListener("change", followScheme);
followScheme();

// Its own is a link within the button that opens an operation: one control within another.
const plainDeepLink = ({ React }) => ({
  components: { DeepLink: ({ text }) => React.createElement("span", null, text) },
});

window.SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  plugins: [plainDeepLink],
  validatorUrl: null, // the default asks another host
});
