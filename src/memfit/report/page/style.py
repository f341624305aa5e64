"""The page's style sheet: light and dark, from 320 px up, no file beside the page."""

STYLE = """
:root{--bg:#fbfbf9;--card:#fff;--ink:#1d1f21;--soft:#5c6166;--line:#dcdcd6;--accent:#0068a3;
--fits:#0b6b3a;--at_risk:#8a5a00;--does_not_fit:#b3261e;--unproven:#1f5f8b;--track:#eeeee9}
@media (prefers-color-scheme:dark){:root{--bg:#14161a;--card:#1c1f24;--ink:#e8e6e1;--soft:#a3a7ad;
--line:#343941;--accent:#6cb8ec;--fits:#5fd39a;--at_risk:#f0b849;--does_not_fit:#ff8a80;
--unproven:#7fc4f0;--track:#2a2e35}}
*{box-sizing:border-box}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif}
main{max-width:1040px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:0 0 12px}
h3{font-size:.95rem;margin:20px 0 8px}
.two h3{margin-top:4px}
p{margin:0 0 8px}
.soft{color:var(--soft)}
.small{font-size:.85rem}
code,pre,.mono{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
font-size:.86em}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--bg);border:1px solid var(--line);
border-radius:8px;padding:12px;margin:0}
section,header{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:20px;margin:0 0 16px}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 16px;padding:0 20px}
a{color:var(--accent)}
.verdict{display:inline-block;font-weight:700;letter-spacing:.03em;border:2px solid currentColor;
border-radius:999px;padding:2px 14px;margin:0 8px 8px 0}
.fits{color:var(--fits)}.at_risk{color:var(--at_risk)}
.does_not_fit{color:var(--does_not_fit)}.unproven{color:var(--unproven)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(150px,45%),1fr));gap:12px;
margin:16px 0 0}
.figure{border:1px solid var(--line);border-radius:10px;padding:10px 12px;min-width:0}
.figure b{display:block;font-size:1.25rem;line-height:1.3;font-variant-numeric:tabular-nums}
.figure span{color:var(--soft);font-size:.82rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{text-align:left;padding:6px 10px 6px 0;border-bottom:1px solid var(--line);
vertical-align:top}
th{color:var(--soft);font-weight:600}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
th.n{white-space:normal}
.mono{display:inline-block;min-width:6.5em;overflow-wrap:anywhere}
.chosen td{font-weight:600}
.bars{display:grid;gap:10px;margin:0 0 4px}
.bar{display:grid;grid-template-columns:112px minmax(0,1fr) 92px;gap:10px;align-items:center;
font-size:.9rem}
.track{position:relative;height:34px;background:var(--track);border-radius:6px}
.fill{display:flex;height:100%;border-radius:6px;overflow:hidden}
.seg{height:100%;overflow:hidden;white-space:nowrap;font-size:.74rem;line-height:34px;
text-align:center;border-right:1px solid var(--card);min-width:1px}
.limit{position:absolute;top:-5px;bottom:-5px;width:0;border-left:3px solid var(--ink)}
.thin .track{height:14px}.thin{gap:4px}.thin .bar{margin:0}
.key{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px;border:1px solid var(--line)}
.curve{display:grid;grid-template-columns:auto minmax(0,1fr);gap:2px 8px;font-size:.8rem;
color:var(--soft)}
.curve svg{width:100%;height:220px;background:var(--bg);border:1px solid var(--line);
border-radius:8px}
.ys{display:flex;flex-direction:column;justify-content:space-between;text-align:right;
font-variant-numeric:tabular-nums}
.xs{grid-column:2;display:flex;justify-content:space-between;
font-variant-numeric:tabular-nums}
.train{stroke:var(--accent);fill:none;stroke-width:2}
.held{stroke:var(--does_not_fit);fill:none;stroke-width:2;stroke-dasharray:5 4}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:16px}
@media (max-width:560px){.bar{grid-template-columns:1fr auto}.bar .track{grid-column:1/-1;
grid-row:2}.bar{gap:3px 10px}.thin{gap:12px}table:has(td:nth-child(4)){min-width:36rem}
section,header{padding:14px}main{padding:12px 8px 40px}}
@media (max-width:900px){.scroll{
background:linear-gradient(90deg,var(--card) 50%,transparent) 0 0/28px,
linear-gradient(270deg,var(--card) 50%,transparent) 100% 0/28px,
linear-gradient(90deg,var(--soft),transparent) 0 0/9px,
linear-gradient(270deg,var(--soft),transparent) 100% 0/9px;background-repeat:no-repeat;
background-attachment:local,local,scroll,scroll}}
summary{cursor:pointer;padding:8px 0;font-size:.9rem}
@media print{section,header{break-inside:avoid}}
"""
