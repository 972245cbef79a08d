"use strict";
// Formatting of numbers, and creation of DOM elements. Values from the job are only ever inserted as text.

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

function figure(value, digits = 4) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (value !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential();
  return Number(value.toPrecision(digits)).toLocaleString("en");
}

const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");

const percent = (value) => (known(value) ? `${(value * 100).toFixed(1)} %` : "–");

function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
  return `${figure(value, 3)} ${units[power]}`;
}

function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.5) return `${seconds < 9.95 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const [days, hours] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24];
  const [minutes, rest] = [Math.floor(whole / 60) % 60, whole % 60];
  if (days) return hours ? `${days} d ${hours} h` : `${days} d`;
  if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  return rest ? `${minutes} min ${rest} s` : `${minutes} min`;
}

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
