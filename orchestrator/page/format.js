"use strict";
// Formatting of numbers, and creation of DOM elements. Values from the job are only inserted as text, never as HTML.

const FINAL = ["succeeded", "failed", "stopped"];

const byId = (id) => document.getElementById(id);

function element(tag, attributes, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) created.setAttribute(name, value);
  created.append(...children);
  return created;
}

function shape(tag, attributes, ...children) {
  const created = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) created.setAttribute(name, value);
  created.append(...children);
  return created;
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

// Each format shows as many digits as a value needs, and `more` if labels on an axis would otherwise look the same.
function figure(value, more = 0) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (value !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3 + more)).toExponential();
  return value.toLocaleString("en", { maximumSignificantDigits: Math.min(4 + more, 15) });
}

const count = (value, more = 0) => (known(value) ? value.toLocaleString("en", { maximumFractionDigits: more }) : "–");

const percent = (value, more = 0) => (known(value) ? `${(value * 100).toFixed(1 + more)} %` : "–");

const share = (value) => (known(value) ? `${figure(100 * value, -2)} %` : "–");

function bytes(value, more = 0) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
  return `${figure(value, more - 1)} ${units[power]}`;
}

function duration(seconds, more = 0) {
  if (!known(seconds)) return "–";
  if (seconds <= 0) return "0 s";
  const digits = (value, least) => value.toLocaleString("en", { maximumSignificantDigits: least + more });
  if (seconds < 0.9995) return `${seconds < 0.00995 ? digits(seconds * 1000, 2) : count(seconds * 1000, more)} ms`;
  if (seconds < 59.5 || (more && seconds < 3600)) return `${seconds < 9.95 ? digits(seconds, 2) : count(seconds, more)} s`;
  const whole = Math.round(seconds);
  const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
  const first = parts.findIndex(([amount]) => amount);
  return parts.slice(first, first + 2 + more).filter(([amount]) => amount).map((part) => part.join(" ")).join(" ");
}

const rate = (value, more = 0) => (Math.abs(value) < 100 ? figure(value, more - 1) : count(value, more));

const clock = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleTimeString();

// Rebuilds an element only if its value has changed, which keeps selections and scroll positions.
const rendered = new Map();
function render(id, value, build) {
  const key = JSON.stringify(value);
  if (rendered.get(id) === key) return;
  rendered.set(id, key);
  byId(id).replaceChildren(...build(value));
}

function facts(id, pairs) {
  render(id, pairs, (rows) => rows.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

const range = (min, max) => (min === max ? count(max) : `${count(min)} to ${count(max)}`);
