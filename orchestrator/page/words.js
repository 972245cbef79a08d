"use strict";
// Numbers as people read them, and elements whose text is only ever text.

const byId = (id) => document.getElementById(id);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const known = (value) => typeof value === "number" && Number.isFinite(value);

function figure(value, digits = 4) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (value !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString("en");
}

const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");

const percent = (value) => (known(value) ? `${(value * 100).toFixed(1)} %` : "–");

function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${figure(value, 3)} ${units[at]}`;
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

// Rebuilds a part only if what it shows has changed, so that selections and scrolling stay.
const shown = new Map();
function put(id, value, build) {
  const key = JSON.stringify(value);
  if (shown.get(id) === key) return;
  shown.set(id, key);
  byId(id).replaceChildren(...build(value));
}

function facts(id, pairs) {
  put(id, pairs, (rows) => rows.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

const range = (least, most) => (least === most ? count(most) : `${count(least)} to ${count(most)}`);
