// Charts as SVG: lines over steps or time, and the world size. All charts share a cursor, which follows the pointer,
// a finger, or the arrow keys.

const EDGE = { left: 54, right: 12, top: 12, bottom: 22 };
const view = { smoothing: 0, log: false, byTime: false };
const plots = new Map();
let cursor = null; // { axis: "step" or "time", at: position on that axis }

const axisOfView = () => (view.byTime ? "time" : "step");
const axisText = (axis, at) => (axis === "time" ? `after ${duration(at)}` : `step ${count(at)}`);

// Calls `make` with `wanted` or a greater number, until it returns at least `least` values: a single one shows no scale.
function enough(make, wanted, least) {
  for (let number = wanted; number < 4 * wanted; number += 1) {
    const values = make(number);
    if (values.length >= least) return values;
  }
  return make(4 * wanted);
}

// Formats values with as many digits as distinguish them.
function labelsOf(values, format) {
  for (let more = 0; more < 12; more += 1) {
    const texts = values.map((value) => format(value, more));
    if (new Set(texts).size === texts.length) return texts;
  }
  return values.map(String);
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    values.push(Number(value.toPrecision(12)));
  }
  return values;
}

// Ticks at round numbers of the unit that `bytes` shows.
function byteTicks(low, high, wanted) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(high / 2) / 10));
  return ticks(low / unit, high / unit, wanted).map((value) => value * unit);
}

function logTicks(low, high) {
  const decades = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) decades.push(power);
  const factors = decades.length > 3 ? [1] : decades.length > 1 ? [1, 3] : [1, 2, 5];
  const every = Math.ceil(decades.length / 6);
  const values = decades.filter((_, index) => index % every === 0)
    .flatMap((power) => factors.map((factor) => Number((factor * 10 ** power).toPrecision(3))));
  const inside = values.filter((value) => value >= low && value <= high);
  return inside.length > 1 ? inside : ticks(low, high, 3).filter((value) => value > 0);
}

const SPANS_S = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

function timeTicks(low, high, wanted) {
  const length = Math.max(high - low, 0.1);
  const step = SPANS_S.find((span) => span * wanted >= length) || Math.ceil(length / wanted / 86400) * 86400;
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, index) => Number(((first + index) * step).toFixed(1)));
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

// Makes the frame of a plot: an SVG with grid and labels, its size, and its scales (`back`: from pixels to the x axis).
function frame(element, { axis, x: [left, right], y: [low, high], log, format, yTicks }) {
  const width = Math.max(220, element.clientWidth);
  const height = element.clientHeight || 150;
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const bottom = height - EDGE.bottom;
  const x = scale(left, right, EDGE.left, width - EDGE.right);
  const linear = log ? scale(Math.log10(low), Math.log10(high), bottom, EDGE.top) : scale(low, high, bottom, EDGE.top);
  const y = log ? (value) => linear(Math.log10(value)) : linear;
  const linearTicks = format === bytes ? byteTicks : ticks;
  const values = yTicks || (log ? logTicks(low, high) : enough((wanted) => linearTicks(low, high, wanted), height > 200 ? 5 : 3, 3));
  const labels = labelsOf(values, format);
  for (const [index, value] of values.entries()) {
    const level = y(value);
    drawing.append(shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: level, y2: level }));
    drawing.append(shape("text", { x: EDGE.left - 6, y: level + 4, "text-anchor": "end" }, labels[index]));
  }
  const wanted = width < 420 ? 3 : 6;
  const along = (number) => (axis === "time" ? timeTicks(left, right, number) : ticks(left, right, number).filter(Number.isInteger));
  const marks = left === right ? [left] : enough(along, wanted, 2);
  const texts = axis === "time" ? labelsOf(marks, (value, more) => (value ? duration(value, more) : "start")) : marks.map((value) => count(value));
  for (const [index, value] of marks.entries()) {
    const text = texts[index];
    const half = text.length * 3.2;
    const anchor = x(value) - half < EDGE.left ? "start" : x(value) + half > width - EDGE.right ? "end" : "middle";
    drawing.append(shape("text", { x: x(value), y: height - 5, "text-anchor": anchor }, text));
  }
  return { width, height, bottom, drawing, x, y, back: scale(EDGE.left, width - EDGE.right, left, right) };
}

// Returns the time of a step, by interpolation between rows of elapsed_s. The minimum of a row is the time of its first step.
function timeOf(times, step) {
  let [low, high] = [0, times.length - 1];
  if (high < 0) return null;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle][0] <= step) low = middle; else high = middle - 1;
  }
  const [first, mean, least = mean, most = mean] = times[low];
  const after = times[low + 1];
  if (!after) return step > first ? most : least;
  const next = after.length > 2 ? after[2] : after[1];
  return least + ((next - least) * Math.max(0, step - first)) / (after[0] - first);
}

function toPoints(rows, times) {
  return rows.map(([step, mean, low = mean, high = mean, nonfinite = mean === null ? 1 : 0]) =>
    ({ step, x: view.byTime ? timeOf(times, step) : step, mean, low, high, nonfinite }))
    .filter((point) => known(point.x));
}

// Exponential moving average, corrected for the bias of its first values towards zero.
function smooth(points) {
  let [sum, weight] = [0, 0];
  return points.map((point) => {
    if (!known(point.mean)) return { ...point, shown: null };
    sum = view.smoothing * sum + (1 - view.smoothing) * point.mean;
    weight = view.smoothing * weight + 1 - view.smoothing;
    return { ...point, shown: sum / weight };
  });
}

function nearest(points, at) {
  let [low, high] = [0, points.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle].x <= at) low = middle; else high = middle;
  }
  return Math.abs(points[low].x - at) <= Math.abs(points[high].x - at) ? low : high;
}

function linePath(points, x, y, value) {
  let [pen, path] = ["M", ""];
  for (const point of points) {
    const level = known(value(point)) ? y(value(point)) : NaN;
    if (!Number.isFinite(level)) { pen = "M"; continue; }
    path += `${pen}${x(point.x).toFixed(1)} ${level.toFixed(1)}`;
    pen = "L";
  }
  return path;
}

function areaPath(points, x, y, upper, lower) {
  const inside = points.filter((point) => Number.isFinite(y(upper(point))) && Number.isFinite(y(lower(point))));
  if (inside.length < 2) return "";
  const there = inside.map((point) => `${x(point.x).toFixed(1)} ${y(upper(point)).toFixed(1)}`);
  const back = inside.reverse().map((point) => `${x(point.x).toFixed(1)} ${y(lower(point)).toFixed(1)}`);
  return `M${there.join("L")}L${back.join("L")}Z`;
}

// Draws lines of `series`, each { name, colour, rows, times }. With `stacked`, draws areas on top of each other;
// areas that are too thin to be seen are drawn as one.
function lineChart(figure, { title, series, format, stacked }) {
  const [plot, readout, legend] = ["plot", "readout", "legend"].map((name) => figure.querySelector(`.${name}`));
  const lines = series.map((line) => ({ ...line, points: smooth(toPoints(line.rows, line.times)) }))
    .filter((line) => line.points.some((point) => known(point.mean)));
  const log = view.log && !stacked;
  if (stacked) stack(lines);
  const thin = lines.filter((line) => line.isThin);
  const seen = lines.flatMap((line) => line.points.flatMap((point) => (stacked ? [point.top] : [point.low, point.high])))
    .filter((value) => known(value) && (!log || value > 0));
  if (!seen.length) {
    plots.delete(figure.id);
    legend.replaceChildren();
    readout.textContent = lines.length ? "no value above 0" : "no value yet";
    plot.replaceChildren();
    return;
  }
  const ends = lines.flatMap((line) => [line.points[0].x, line.points[line.points.length - 1].x]);
  const box = frame(plot, {
    axis: axisOfView(), x: [Math.min(...ends), Math.max(...ends)], y: valueRange(seen, log, stacked), log, format,
  });
  const { drawing, x, y } = box;
  for (const line of lines) {
    const colour = `var(--${line.colour})`;
    if (stacked) {
      if (line.isThin) continue;
      drawing.append(shape("path", { class: "layer", fill: colour, d: areaPath(line.points, x, y, (point) => point.top, (point) => point.base) }));
      continue;
    }
    const above = log ? (value) => (value > 0 ? value : null) : (value) => value;
    drawing.append(shape("path", { class: "band", fill: colour,
      d: areaPath(line.points, x, y, (point) => above(point.high), (point) => above(point.low)) }));
    if (view.smoothing) drawing.append(shape("path", { class: "curve raw", stroke: colour, d: linePath(line.points, x, y, (point) => above(point.mean)) }));
    drawing.append(shape("path", { class: "curve", stroke: colour, d: linePath(line.points, x, y, (point) => above(point.shown)) }));
    const [only] = line.points;
    if (line.points.length === 1 && known(only.mean)) drawing.append(shape("circle", { cx: x(only.x), cy: y(only.mean), r: 3, fill: colour }));
    for (const point of line.points.filter((candidate) => candidate.nonfinite)) {
      drawing.append(shape("path", { class: "fault", d: `M${x(point.x) - 4} ${box.bottom}h8l-4 -7z` },
        shape("title", {}, `step ${count(point.step)}: ${count(point.nonfinite)} inf or nan`)));
    }
  }
  if (thin.length) {
    const [first, last] = [thin[0].points, thin[thin.length - 1].points];
    drawing.append(shape("path", { class: "layer thin", d: areaPath(last, x, y, (point) => point.top, (point) => first[nearest(first, point.x)].base) }));
  }
  const items = lines.map((line) => element("b", {}));
  legend.replaceChildren(...(series.length < 2 ? [] : lines.map((line, index) =>
    element("li", {}, element("span", { class: line.isThin ? "spot kink" : `spot k${line.colour.slice(1)}` }), line.name, items[index]))));
  const describe = (point) => format(point.mean) +
    (point.high > point.low ? ` (${format(point.low)} to ${format(point.high)})` : "") +
    (point.nonfinite ? `, ${count(point.nonfinite)} not finite` : "");
  addCursor(figure, plot, box, {
    title, axis: axisOfView(), points: longest(lines).points,
    marks: (at) => lines.filter((line) => !line.isThin || line === thin[thin.length - 1]).map((line) => {
      const point = line.points[nearest(line.points, at)];
      const value = stacked ? point.top : point.shown;
      return { x: x(point.x), y: known(value) ? y(value) : NaN, colour: line.colour };
    }),
    show: (at) => {
      const points = lines.map((line) => (at === null ? line.points[line.points.length - 1] : line.points[nearest(line.points, at)]));
      const whole = stacked ? points.reduce((sum, point) => sum + (point.mean || 0), 0) : 0;
      points.forEach((point, index) => { items[index].textContent = format(point.mean) + (whole ? ` · ${share(point.mean / whole)}` : ""); });
      const where = at === null ? "" : `${axisText("step", points[0].step)}${view.byTime ? `, ${axisText("time", points[0].x)}` : ""}`;
      const value = series.length > 1 ? "" : describe(points[0]);
      readout.textContent = [value, where].filter(Boolean).join(" · ");
      return `${where}: ${lines.map((line, index) => `${lines.length > 1 ? `${line.name} ` : ""}${format(points[index].mean)}`).join(", ")}`;
    },
  });
}

const longest = (lines) => lines.reduce((best, line) => (line.points.length > best.points.length ? line : best));

const THIN = 0.02; // share of the whole below which an area is thin: about two pixels

// Computes the areas of stacked lines. Thin lines are on top, in a common colour.
function stack(lines) {
  const sums = new Map(lines.map((line) => [line, line.points.reduce((sum, point) => sum + Math.max(0, point.mean || 0), 0)]));
  const whole = [...sums.values()].reduce((sum, part) => sum + part, 0);
  for (const line of lines) line.isThin = sums.get(line) < THIN * whole;
  for (const line of lines) if (line.isThin) line.colour = "ink";
  lines.sort((left, right) => left.isThin - right.isThin);
  const base = new Map();
  for (const line of lines) {
    for (const point of line.points) {
      point.base = base.get(point.step) || 0;
      point.top = point.base + Math.max(0, point.mean || 0);
      base.set(point.step, point.top);
    }
  }
}

function valueRange(values, log, fromZero) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
  if (fromZero) return [0, high * 1.05 || 1];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

// Puts a drawing into its plot. Pointer and keys in the plot move the cursor of all charts.
function addCursor(figure, plot, box, chart) {
  const line = shape("line", { class: "cursor", y1: EDGE.top, y2: box.bottom, visibility: "hidden" });
  const dots = shape("g", {});
  box.drawing.append(line, dots);
  plot.replaceChildren(box.drawing);
  const { points } = chart;
  const [first, last] = [points[0].x, points[points.length - 1].x];
  const ends = { role: "slider", tabindex: 0, "aria-label": chart.title, "aria-valuemin": first, "aria-valuemax": last };
  for (const [name, value] of Object.entries(ends)) plot.setAttribute(name, value);
  const place = () => {
    const isInside = cursor && cursor.axis === chart.axis && cursor.at >= first && cursor.at <= last;
    const here = isInside ? cursor.at : null;
    const text = chart.show(here);
    plot.setAttribute("aria-valuenow", here === null ? last : here);
    plot.setAttribute("aria-valuetext", text);
    line.setAttribute("visibility", here === null ? "hidden" : "visible");
    const marks = here === null ? [] : chart.marks(here);
    if (marks.length) for (const end of ["x1", "x2"]) line.setAttribute(end, marks[0].x);
    dots.replaceChildren(...marks.filter((mark) => Number.isFinite(mark.y))
      .map((mark) => shape("circle", { cx: mark.x, cy: mark.y, r: 3.5, fill: `var(--${mark.colour})` })));
  };
  plots.set(figure.id, { place });
  const toPointer = (event) => {
    const pixels = ((event.clientX - plot.getBoundingClientRect().left) * box.width) / plot.clientWidth;
    moveCursor({ axis: chart.axis, at: Math.min(Math.max(box.back(pixels), first), last) });
  };
  plot.onpointermove = toPointer;
  plot.onpointerdown = toPointer;
  plot.onpointerleave = () => moveCursor(null);
  plot.onblur = () => moveCursor(null);
  plot.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") moveCursor(null);
    if (by === undefined) return;
    event.preventDefault();
    const here = cursor && cursor.axis === chart.axis ? nearest(points, cursor.at) : points.length - 1;
    moveCursor({ axis: chart.axis, at: points[Math.min(points.length - 1, Math.max(0, here + by))].x });
  };
  place();
}

function moveCursor(to) {
  cursor = to;
  for (const plot of plots.values()) plot.place();
}

const MIN_DIP = 4; // least width of a dip, in pixels: a repair may take a fraction of a second in a run of days

// Draws the number of ranks over time, or of a role's workers, which have no generations.
function worldChart(figure, { began, until, generations, faults, checkpoints, maxWorkers, title, noun, none }) {
  const [plot, readout] = [figure.querySelector(".plot"), figure.querySelector(".readout")];
  if (!generations.length) {
    plots.delete(figure.id);
    readout.textContent = none;
    plot.replaceChildren();
    return;
  }
  const top = Math.max(maxWorkers || 0, ...generations.map((entry) => entry.world_size));
  const box = frame(plot, {
    axis: "time", x: [0, Math.max(until - began, 1)], y: [0, top * 1.2], format: count,
    yTicks: ticks(0, top, Math.min(3, top)).filter(Number.isInteger),
  });
  const { drawing, x, y, bottom } = box;
  const points = generations.map((entry) => ({ ...entry, x: Math.max(0, entry.at_s - began) }));
  let path = `M${x(points[0].x)} ${bottom}`;
  let from = x(points[0].x);
  points.forEach((point, index) => {
    const next = points[index + 1];
    const dips = next && next.world_size > point.world_size;
    const to = Math.max(x(next ? next.x : Math.max(until - began, point.x)), from + (dips ? MIN_DIP : 0));
    path += `V${y(point.world_size)}H${to}`;
    from = to;
  });
  drawing.append(shape("path", { class: "size", d: `${path}V${bottom}` }));
  if (maxWorkers) drawing.append(shape("line", { class: "limit", x1: EDGE.left, x2: box.width - EDGE.right, y1: y(maxWorkers), y2: y(maxWorkers) }));
  for (const checkpoint of checkpoints) {
    const left = x(Math.max(0, checkpoint.at_s - began));
    drawing.append(shape("line", { class: "saved", x1: left, x2: left, y1: bottom, y2: bottom - 8 }));
  }
  for (const fault of faults) {
    const left = x(Math.max(0, fault.at_s - began));
    drawing.append(shape("line", { class: "faultline", x1: left, x2: left, y1: EDGE.top, y2: bottom }));
    drawing.append(shape("path", { class: "fault", d: `M${left - 6} ${EDGE.top - 10}h12l-6 11z` }));
  }
  const sizeAt = (at) => [...points].reverse().find((point) => point.x <= at);
  const near = (at, entries, pixels) => entries.find((entry) => Math.abs(x(entry.at_s - began) - x(at)) < pixels);
  const stops = [...points, ...faults.map((fault) => ({ x: fault.at_s - began })), { x: Math.max(until - began, 0) }];
  addCursor(figure, plot, box, {
    title: `${title}; ${faults.length} faults${noun === "rank" ? `, ${checkpoints.length} checkpoints` : ""}`, axis: "time",
    points: [{ x: 0 }, ...stops.sort((left, right) => left.x - right.x)],
    marks: (at) => [{ x: x(at), y: y((sizeAt(at) || { world_size: 0 }).world_size), colour: "accent" }],
    show: (at) => {
      const entry = at === null ? points[points.length - 1] : sizeAt(at);
      const fault = at === null ? null : near(at, faults, 6);
      const saved = at === null || fault ? null : near(at, checkpoints, 3);
      readout.textContent = [
        entry ? `${count(entry.world_size)} ${noun}${entry.world_size === 1 ? "" : "s"}${noun === "rank" ? `, generation ${entry.generation}` : ""}` : `no ${noun}`,
        at === null ? "" : axisText("time", at), fault ? `${fault.cause}: ${fault.text}` : "",
        saved ? `checkpoint of step ${count(saved.step)}` : "",
      ].filter(Boolean).join(" · ");
      return readout.textContent;
    },
  });
}
