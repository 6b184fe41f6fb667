"""Style and script of `report.html`: one page without a network, light or dark as the reader's system asks, tables
that sort when a heading is pressed.
"""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1d1d1f; --faint: #63636b; --line: #d6d6db; --row: #f4f5f7; --link: #0a58a6;
  --card: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16181c; --ink: #e6e6ea; --faint: #a3a6ae; --line: #3a3d44; --row: #1f2227; --link: #7db7f2;
    --card: #e9e9ec;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 75rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p, ul { max-width: 52rem; margin: .5rem 0; }
.faint, figcaption { color: var(--faint); }
code, pre { font: .85rem/1.45 ui-monospace, monospace; }
pre { background: var(--row); border: 1px solid var(--line); padding: .6rem .8rem; overflow-x: auto; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .55rem; border-bottom: 1px solid var(--line); white-space: nowrap; text-align: right; }
th { vertical-align: bottom; padding: 0; background: var(--row); white-space: normal; line-height: 1.3; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); z-index: 1; }
th:first-child, tbody tr:hover td:first-child { background: var(--row); }
th button {
  all: unset; display: block; width: 100%; box-sizing: border-box; padding: .35rem .55rem; cursor: pointer;
  font-weight: 600; text-align: inherit;
}
th button:focus-visible { outline: 2px solid var(--link); outline-offset: -2px; }
th button::after { content: "\\2195"; color: var(--faint); padding-left: .3rem; font-weight: 400; }
th[aria-sort=ascending] button::after { content: "\\2191"; color: var(--link); }
th[aria-sort=descending] button::after { content: "\\2193"; color: var(--link); }
.left { text-align: left; }
tbody tr:hover { background: var(--row); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: .5rem 0; }
dt { color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; background: var(--card); border-radius: 4px; padding: 4px; }
summary { cursor: pointer; color: var(--link); margin: .5rem 0; }
@media print { th button::after { content: none; } details { display: none; } }
"""

# Numbers sort as numbers, before texts such as "OOM"; equal keys keep their order. A second press turns the order.
SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
    const direction = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    headings.forEach(other => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", direction === 1 ? "ascending" : "descending");
    const key = row => {
      const cell = row.cells[column], number = parseFloat(cell.dataset.value);
      return [Number.isNaN(number) ? null : number, cell.textContent];
    };
    const compare = ([a, textA], [b, textB]) =>
      a !== null && b !== null ? direction * (a - b)
      : a !== null ? -1 : b !== null ? 1
      : direction * textA.localeCompare(textB, undefined, {numeric: true});
    [...body.rows].map(row => [key(row), row]).sort((x, y) => compare(x[0], y[0]))
      .forEach(([, row]) => body.append(row));
  }));
}
"""
