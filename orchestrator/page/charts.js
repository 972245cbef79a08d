// The loss curve and the world size over time, as SVG.

const HEIGHT = 190;
const EDGE = { left: 46, right: 10, top: 12, bottom: 22 };

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

function frame(id, label) {
  const width = Math.max(240, byId(id).clientWidth);
  const drawing = shape("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label,
  });
  return { width, drawing };
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

function gridLines(drawing, width, y, values, format) {
  for (const value of values) {
    const at = y(value);
    drawing.append(shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at }));
    drawing.append(shape("text", { x: EDGE.left - 6, y: at + 4, "text-anchor": "end" }, format(value)));
  }
}

const SPANS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

function timeTicks(length, wanted) {
  const step = SPANS_S.find((span) => span * wanted >= length) || Math.ceil(length / wanted / 86400) * 86400;
  return Array.from({ length: Math.floor(length / step) + 1 }, (_, index) => index * step);
}

function xLabels(drawing, width, x, values, format) {
  for (const value of values) {
    const [at, text] = [x(value), format(value)];
    const half = text.length * 3.2;
    const anchor = at - half < EDGE.left ? "start" : at + half > width - EDGE.right ? "end" : "middle";
    drawing.append(shape("text", { x: at, y: HEIGHT - 5, "text-anchor": anchor }, text));
  }
}

function lossChart(points) {
  const finite = points.filter(([, loss]) => known(loss));
  if (finite.length < 1) return [element("p", { class: "none" }, "No loss has been reported yet.")];
  const [first, last] = [finite[0], finite[finite.length - 1]];
  const label = `Loss from ${figure(first[1])} at step ${count(first[0])} to ${figure(last[1])} at step ${count(last[0])}`;
  const { width, drawing } = frame("loss", label);
  const values = finite.map(([, loss]) => loss);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  [low, high] = [low - margin, high + margin];
  const x = scale(points[0][0], points[points.length - 1][0], EDGE.left, width - EDGE.right - 8);
  const y = scale(low, high, HEIGHT - EDGE.bottom, EDGE.top);
  gridLines(drawing, width, y, ticks(low, high, 4), (value) => figure(value, 3));
  const steps = ticks(points[0][0], points[points.length - 1][0], width < 420 ? 3 : 6);
  xLabels(drawing, width, x, steps.filter(Number.isInteger), (value) => count(value));
  let pen = "M";
  let path = "";
  for (const [step, loss] of points) {
    if (!known(loss)) { pen = "M"; continue; }
    path += `${pen}${x(step).toFixed(1)} ${y(loss).toFixed(1)}`;
    pen = "L";
  }
  drawing.append(shape("path", { class: "curve", d: path }));
  drawing.append(shape("circle", { cx: x(last[0]), cy: y(last[1]), r: 3, fill: "var(--accent)" }));
  return [drawing];
}

function worldChart({ began, until, generations, faults, checkpoints, maxWorkers }) {
  if (!generations.length) return [element("p", { class: "none" }, "No process group has formed yet.")];
  const sizes = generations.map((generation) => generation.world_size);
  const label = `World size now ${sizes[sizes.length - 1]}, generation ${generations[generations.length - 1].generation}; ` +
    `${faults.length} faults, ${checkpoints.length} checkpoints`;
  const { width, drawing } = frame("world", label);
  const top = Math.max(maxWorkers || 0, ...sizes);
  const x = scale(began, Math.max(until, began + 1), EDGE.left, width - EDGE.right);
  const y = scale(0, top * 1.15, HEIGHT - EDGE.bottom, EDGE.top);
  gridLines(drawing, width, y, ticks(0, top, Math.min(4, top)).filter(Number.isInteger), count);
  const times = timeTicks(Math.max(until - began, 1), width < 420 ? 3 : 5);
  xLabels(drawing, width, x, times.map((time) => began + time), (value) => (value === began ? "start" : duration(value - began)));
  const bottom = y(0);
  let path = `M${x(Math.max(began, generations[0].at_s))} ${bottom}`;
  generations.forEach((generation, index) => {
    const end = index + 1 < generations.length ? generations[index + 1].at_s : until;
    path += `V${y(generation.world_size)}H${x(Math.max(began, end))}`;
  });
  drawing.append(shape("path", { class: "size", d: `${path}V${bottom}` }));
  if (maxWorkers) drawing.append(shape("line", { class: "limit", x1: EDGE.left, x2: width - EDGE.right, y1: y(maxWorkers), y2: y(maxWorkers) }));
  for (const checkpoint of checkpoints) {
    const at = x(Math.max(began, checkpoint.at_s));
    drawing.append(shape("line", { class: "saved", x1: at, x2: at, y1: bottom, y2: bottom - 8 },
      shape("title", {}, `checkpoint of step ${checkpoint.step}`)));
  }
  for (const fault of faults) {
    const at = x(Math.max(began, fault.at_s));
    drawing.append(shape("line", { class: "faultline", x1: at, x2: at, y1: EDGE.top + 6, y2: bottom }));
    drawing.append(shape("path", { class: "fault", d: `M${at - 6} ${EDGE.top - 4}h12l-6 11z` },
      shape("title", {}, `${fault.cause}: ${fault.text}`)));
  }
  return [drawing];
}
