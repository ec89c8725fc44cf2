"""The look of a report page, light and dark."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --edge: #e3e6ea; --text: #1b1f24; --soft: #59636e;
  --grid: #e8ebef; --stripe: #f6f7f9; --code: #f3f4f6;
  --a: #0b6bcb; --b: #d1570a; --c: #08875d; --d: #7c5cc4;
  --key: #0b5cad; --number: #9a4600; --word: #086b4a; --remark: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1318; --card: #171c23; --edge: #2a313b; --text: #e4e8ed; --soft: #97a3b0;
    --grid: #262d37; --stripe: #1b2129; --code: #12171d;
    --a: #5aa9f5; --b: #f39a55; --c: #4cc497; --d: #b39af0;
    --key: #7db8f5; --number: #f0ae73; --word: #75d1ac; --remark: #8b949e;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
header p { margin: 4px 0 0; color: var(--soft); }
h1 { margin: 0; font-size: 28px; line-height: 1.2; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 0 0 12px; font-size: 17px; }
section, details { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; margin-top: 20px; }
section { padding: 20px 24px; overflow-x: auto; }
.facts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 24px 0 0;
}
.facts div { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 16px; }
.facts dt { color: var(--soft); font-size: 13px; }
.facts dd {
  margin: 2px 0 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap;
}
.facts small { font-size: 14px; font-weight: 400; color: var(--soft); }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(270px, 1fr)); gap: 8px 24px; margin-top: 16px; }
.small figure { margin: 0; }
figcaption { color: var(--soft); font-size: 13px; margin-bottom: 2px; }
svg.chart { display: block; width: 100%; height: auto; font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg.large { min-width: 520px; }
svg .grid { stroke: var(--grid); }
svg .axis { stroke: var(--soft); opacity: 0.6; }
svg .tick, svg .legend { fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .faint { stroke-width: 1; opacity: 0.4; }
svg .line.a { stroke: var(--a); } svg .line.b { stroke: var(--b); }
svg .line.c { stroke: var(--c); } svg .line.d { stroke: var(--d); }
svg .dot { stroke: var(--card); stroke-width: 1.5; }
svg .dot.a { fill: var(--a); } svg .dot.b { fill: var(--b); }
svg .dot.c { fill: var(--c); } svg .dot.d { fill: var(--d); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; font-size: 13px; text-align: left; border-bottom: 1px solid var(--edge); }
th, td { padding: 6px 14px 6px 0; vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
th.number, td.number { text-align: right; white-space: nowrap; }
tbody tr + tr td { border-top: 1px solid var(--grid); }
tr.emphasis td { font-weight: 600; background: var(--stripe); }
td.key { color: var(--soft); width: 190px; white-space: nowrap; }
td.value { overflow-wrap: anywhere; }
pre {
  margin: 0; padding: 14px 16px; background: var(--code); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
* + pre, .note { margin-top: 12px; }
.note { margin-bottom: 0; color: var(--soft); font-size: 13px; }
summary { cursor: pointer; padding: 14px 24px; font-weight: 600; font-size: 17px; }
details > div { padding: 0 24px 20px; overflow-x: auto; }
.k { color: var(--key); } .n { color: var(--number); } .w { color: var(--word); } .r { color: var(--remark); }
@media print { body { background: none; } section, details, .facts div { break-inside: avoid; } }
"""
