// Builds the page: `npm ci && npm run build`, or `node build.mjs FOLDER` for another place.
// The head of each file says of which sources it is, so that a stale one is found without Node.
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "..", "src", "memfit", "ui", "page");
const sources = [
  ...readdirSync(join(here, "src")).sort().map((name) => `src/${name}`),
  "build.mjs",
  "package-lock.json",
  "tsconfig.json",
];
const digest = createHash("sha256");
for (const name of sources) digest.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
const head = `/* memfit's page, built from ui/ ${digest.digest("hex")} */`;

mkdirSync(out, { recursive: true });
const script = await build({
  metafile: true,
  entryPoints: { app: join(here, "src/main.tsx") },
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "inline",
  banner: { js: head },
  outdir: out,
  absWorkingDir: here,
});
const style = await build({
  metafile: true,
  entryPoints: { app: join(here, "src/app.css") },
  minify: true,
  banner: { css: head },
  outdir: out,
  absWorkingDir: here,
});

// The licence of every package that esbuild has taken a file of.
const folders = new Set();
for (const file of [...Object.keys(script.metafile.inputs), ...Object.keys(style.metafile.inputs)]) {
  const found = file.match(/^(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//);
  if (found) folders.add(resolve(here, found[1]));
}
const licences = [...folders].sort().map((folder) => {
  const { name, version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const text = readFileSync(join(folder, "LICENSE"), "utf8").trim();
  return `${name} ${version} (${license})\n\n${text}\n`;
});
writeFileSync(join(out, "licences.txt"), licences.join("\n\n"));

for (const name of ["index.html", "icon.svg"]) cpSync(join(here, "src", name), join(out, name));
writeFileSync(join(out, "README.md"), "Built from `ui/`; edit that, and build it again: `make page`.\n");
