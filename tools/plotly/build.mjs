// Builds src/plimsoll/report/page/files/plotly.min.js: plotly.js with the traces that Plimsoll's figures use.
// Run `npm ci && npm run build` here after a figure has used another trace type, or for a newer plotly.js.

import { build } from "esbuild";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";

const TRACES = ["bar", "heatmap"]; // scatter is part of the core
const TARGET = resolve(import.meta.dirname, "../../src/plimsoll/report/page/files");
const { version } = JSON.parse(readFileSync("node_modules/plotly.js/package.json", "utf8"));

const STRING = String.raw`(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")`;
const LIST = String.raw`\[(?:\s*${STRING}\s*,?)*\s*\]\s*\.join\(${STRING}\)`;
const DESCRIPTION = new RegExp(String.raw`^(\s*)description:\s*(?:${LIST}|${STRING})(,?)[ \t]*$`, "gm");

// Descriptions of attributes are a fifth of the sources, and only plotly's own documentation reads them.
const withoutDescriptions = {
  name: "without-descriptions",
  setup(bundler) {
    bundler.onLoad({ filter: /plotly\.js\/src\/.*\.js$/ }, ({ path }) => ({
      contents: readFileSync(path, "utf8").replace(DESCRIPTION, "$1description: ''$2"),
    }));
  },
};

const { metafile } = await build({
  stdin: {
    contents: `const Plotly = require("plotly.js/lib/core");
      Plotly.register([${TRACES.map((trace) => `require("plotly.js/lib/${trace}")`)}]);
      module.exports = Plotly;`,
    resolveDir: import.meta.dirname,
  },
  bundle: true, minify: true, format: "iife", globalName: "Plotly", target: "es2020", charset: "ascii", metafile: true,
  define: { global: "window", "process.env.NODE_ENV": '"production"', "define.amd": "false" },
  loader: { ".css": "empty" }, // of maps, which are not drawn
  legalComments: "none", // all licences are in one file
  banner: { js: `/* plotly.js ${version} with scatter, ${TRACES.join(", ")}; licences: plotly.LICENSE.txt */` },
  plugins: [withoutDescriptions],
  outfile: join(TARGET, "plotly.min.js"),
});

/** The folder of the package that a source file is from. */
function packageOf(path) {
  let folder = dirname(path);
  while (!existsSync(join(folder, "package.json")) || !JSON.parse(readFileSync(join(folder, "package.json"))).version) folder = dirname(folder);
  return folder;
}

const packages = [...new Set(Object.entries(Object.values(metafile.outputs)[0].inputs)
  .filter(([path, { bytesInOutput }]) => bytesInOutput && path.includes("node_modules/")).map(([path]) => packageOf(path)))].sort();
writeFileSync(join(TARGET, "plotly.LICENSE.txt"), packages.map((folder) => {
  const { name, version: its, license } = JSON.parse(readFileSync(join(folder, "package.json")));
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  return `${name} ${its} (${license})\n\n${file ? readFileSync(join(folder, file), "utf8").trim() : "No licence text is in the package."}\n`;
}).join(`\n${"-".repeat(80)}\n\n`));
