// Starts Swagger UI on the API's page. The files of Swagger UI come from the package flask-swagger-ui.
"use strict";

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function followScheme() {
  document.documentElement.classList.toggle("dark-mode", dark.matches);
}

dark.addEventListener("change", followScheme);
followScheme();

window.SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null, // the default asks another host
});
