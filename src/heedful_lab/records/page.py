"""The frame of every page: one HTML file with its style and colours, and nothing to load."""

import base64
import html
from string import Template

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark;
  --ink: light-dark(#1c1c1c, #e6e6e6); --paper: light-dark(#fff, #161616);
  --dim: light-dark(#5b5b5b, #a5a5a5); --rule: light-dark(#d8d8d8, #3c3c3c);
  --soft: light-dark(#f4f4f4, #222); --blue: light-dark(#0072b2, #56b4e9);
  --orange: light-dark(#d55e00, #f0883e); --green: light-dark(#00805d, #2fbf93); }
:root:has(#light:checked) { color-scheme: light; }
:root:has(#dark:checked) { color-scheme: dark; }
.theme { float: right; margin: .2rem 0 .4rem 1rem; display: flex; border: 1px solid var(--rule);
  border-radius: 6px; overflow: hidden; font-size: .8rem; color: var(--dim); }
.theme label { padding: .15rem .6rem; cursor: pointer; }
.theme label:has(:checked) { background: var(--soft); color: var(--ink); }
.theme label:has(:focus-visible) { outline: 2px solid var(--blue); outline-offset: -2px; }
.theme input { position: absolute; opacity: 0; pointer-events: none; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-top: .7rem;
  border-top: 1px solid var(--rule); break-after: avoid; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; break-after: avoid; }
p { margin: .4rem 0; }
ul, ol { margin: .4rem 0; padding-left: 1.4rem; }
.note, figcaption { color: var(--dim); font-size: .85rem; }
.wide { overflow-x: auto; }
.written td { white-space: normal; }
.written table { margin-bottom: 1.2rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--rule); }
th { font-weight: 600; }
.n { text-align: right; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1.2rem; align-items: start; }
figure { margin: 0; max-width: 31rem; break-inside: avoid; }
img { display: block; width: 100%; height: auto; background: #fff; border-radius: 4px; }
figcaption { margin-top: .3rem; }
/* Pictures are made for white paper: in the dark light and dark change places, and hues stay. */
:root:has(#dark:checked) img:not(.as-it-is) { filter: invert(.91) hue-rotate(180deg); }
@media (prefers-color-scheme: dark) {
  :root:not(:has(#light:checked)) img:not(.as-it-is) { filter: invert(.91) hue-rotate(180deg); }
}
.masking { margin-bottom: 1.4rem; }
.masking ol { columns: 17rem; font-size: .88rem; }
.tokens { font-family: ui-monospace, monospace; line-height: 1.75; }
.tokens > * { display: inline-block; padding: 0 1px; margin-right: 1px; border-radius: 2px;
  background: color-mix(in srgb, #D55E00 calc(var(--hid) * .6), transparent);
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.tokens > br { display: inline; }
code { background: var(--soft); padding: 0 .2em; }
pre { background: var(--soft); padding: .6rem .8rem; overflow-x: auto; font-size: .82rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; }
@media (max-width: 36rem) {
  table { font-size: .8rem; }
  th, td { white-space: normal; padding-right: .6rem; }
}
@media print {
  .theme { display: none; }
  :root { color-scheme: light !important; }
  img { filter: none !important; }
  body { font-size: 10pt; max-width: none; padding: 0; }
  .wide { overflow: visible; }
  table { font-size: 8pt; }
  th, td { padding: .15rem .6rem .15rem 0; }
  tr, .masking { break-inside: avoid; }
  .pictures { grid-template-columns: 1fr 1fr; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
$style</style>
</head>
<body>
<div class="theme" role="radiogroup" aria-label="colours">
<label><input type="radio" name="theme" id="auto" checked>auto</label>
<label><input type="radio" name="theme" id="light">light</label>
<label><input type="radio" name="theme" id="dark">dark</label>
</div>
<h1>$title</h1>
<p>$lead</p>
$body
$script</body>
</html>
""")


def picture(svg: bytes, text: str, kind: str = "") -> str:
    """A drawing and its caption; `kind` is `as-it-is` where that speaks of light and dark."""
    data, text = base64.b64encode(svg).decode(), html.escape(text)
    return (
        f"<figure><img class='{kind}' alt='{text}' src='data:image/svg+xml;base64,{data}'>"
        f"<figcaption>{text}</figcaption></figure>"
    )


def side_by_side(pictures: list[str]) -> str:
    """Pictures beside each other, as many as there is room for."""
    return f"<div class='pictures'>{''.join(pictures)}</div>" if pictures else ""
