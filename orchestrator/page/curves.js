// The charts, with the curves that each shows, and the settings of their display.

const CHARTS = [
  { id: "loss", title: "Loss", curves: { loss: "loss" }, format: figure },
  { id: "rate", title: "Learning rate", curves: { lr: "learning rate" }, format: figure },
  { id: "norm", title: "Gradient norm", curves: { grad_norm: "norm" }, format: figure },
  { id: "samples", title: "Samples/s", curves: { samples_per_s: "samples/s" }, format: rate },
  { id: "speed", title: "Tokens/s", curves: { tokens_per_s: "tokens/s" }, format: rate },
  { id: "step", title: "Step time", curves: { step_s: "step" }, format: duration },
  { id: "utilization", title: "Flops utilization", curves: { mfu: "utilization" }, format: percent },
  { id: "gpu", title: "GPU use", curves: { gpu_utilization: "time with a kernel running" }, format: percent },
  { id: "cpu", title: "CPU cores of a rank", curves: { cpu_cores: "cores in use" }, format: figure },
  { id: "memory", title: "Memory of a rank", curves: { resident_bytes: "process, resident", device_peak_bytes: "device, peak" }, format: bytes },
  { id: "lag", title: "Lag of samples, in steps", curves: { "rollouts/lag": "mean, to the maximum" }, format: figure },
  { id: "tasks", title: "Rollouts", curves: { "rollouts/leased": "tasks in flight", "rollouts/ready": "ready prompts" }, format: figure },
  { id: "waits", title: "Waiting for other ranks", curves: { exposed_comm_s: "seconds of a step" }, format: duration },
];
const STEP_PHASES = ["data", "forward", "backward", "reduce", "update", "publish", "mirror", "other"];
const LINE_COLOURS = ["c1", "c3", "c4", "c2", "c6", "c5", "c8", "c7"];

const userChart = (name) => ({
  id: `user-${name}`, title: name.slice("user/".length), curves: { [name]: name }, format: figure, colour: "c4",
});

const WAITS = { task_wait_s: "for tasks", weights_wait_s: "for weights" };

function roleChart(name) {
  const [, role, value] = name.split("/");
  const isRate = value === "tokens_per_s";
  const title = `${role}: ${isRate ? "tokens/s" : name.slice(`roles/${role}/`.length)}`;
  return { id: `role-${name}`, title, curves: { [name]: name }, format: isRate ? rate : figure, colour: "c2" };
}

// Returns the charts of roles. One shows how long ranks and roles wait for each other; a role's seconds are summed over
// its workers.
function roleCharts(names) {
  const roles = [...names].filter((name) => name.startsWith("roles/")).sort();
  const waits = roles.map((name) => name.split("/")).filter(([, , value]) => WAITS[value])
    .map((parts) => [parts.join("/"), `${parts[1]}, ${WAITS[parts[2]]}`]);
  const curves = { "phases/data": "ranks, for samples", ...Object.fromEntries(waits) };
  const others = roles.filter((name) => !curves[name]).map(roleChart);
  return waits.length ? [{ id: "role-waits", title: "Waiting: seconds of a step", curves, format: duration }, ...others] : others;
}

// In a comparison, each job's lines have the colour of the job's row.
const isComparison = (histories) => histories.some((history) => history.colour);

// Returns the charts that have a curve, and always the loss. The phases of a single job are stacked in one chart.
function chartsOf(names, histories) {
  const charts = CHARTS.filter((chart) => chart.id === "loss" || Object.keys(chart.curves).some((name) => names.has(name)));
  const users = [...names].filter((name) => name.startsWith("user/")).sort().map(userChart);
  const phases = isComparison(histories) ? [] : STEP_PHASES.filter((phase) => names.has(`phases/${phase}`));
  return [
    ...[...charts, ...streamCharts(names, histories), ...roleCharts(names), ...users].map((chart) => ({ ...chart, series: seriesOf(chart, histories) })),
    ...(phases.length ? [{
      id: "phases", title: "Phases of a step", format: duration, stacked: true,
      series: phases.map((phase) => line(histories[0], `phases/${phase}`, phase, `c${PHASES[phase] || 7}`)),
    }] : []),
  ];
}

// Shows the charts. For one job, a chart has a line for each of its curves; in a comparison, a line for each job.
function showCurves(histories) {
  const names = new Set(histories.flatMap((history) => Object.keys(history.curves)));
  const charts = chartsOf(names, histories);
  const wanted = charts.map((chart) => `chart-${chart.id}`);
  for (const old of [...byId("charts").children]) {
    if (!wanted.includes(old.id)) { plots.delete(old.id); old.remove(); }
  }
  charts.forEach((chart, index) => {
    const shown = document.getElementById(wanted[index]) || newFigure(wanted[index], chart.title);
    if (byId("charts").children[index] !== shown) byId("charts").insertBefore(shown, byId("charts").children[index] || null);
    lineChart(shown, chart);
  });
  const dropped = [...new Set(histories.flatMap((history) => history.names_without_curve))];
  byId("dropped").textContent = dropped.length ? `Without a curve, because there are too many: ${dropped.join(", ")}` : "";
}

function seriesOf(chart, histories) {
  if (isComparison(histories)) {
    const [name] = Object.keys(chart.curves);
    return histories.map((history) => line(history, name, history.job, history.colour));
  }
  return histories.flatMap((history) => Object.entries(chart.curves)
    .filter(([name]) => history.curves[name])
    .map(([name, label], index) => line(history, name, label, index ? LINE_COLOURS[index % LINE_COLOURS.length] : chart.colour || "c1")));
}

function line(history, curve, name, colour) {
  return { name, colour, rows: history.curves[curve] || [], times: history.curves.elapsed_s || [] };
}

function newFigure(id, title) {
  return element("figure", { id, class: "chart" },
    element("figcaption", {}, element("b", {}, title), element("span", { class: "readout" })),
    element("div", { class: "plot" }), element("ul", { class: "legend" }));
}

function onSettings(redraw) {
  byId("smoothing").addEventListener("input", (event) => {
    view.smoothing = Number(event.target.value);
    byId("smoothing-value").textContent = view.smoothing.toFixed(2);
    redraw();
  });
  for (const [id, name] of [["log", "log"], ["by-time", "byTime"]]) {
    byId(id).addEventListener("change", (event) => {
      view[name] = event.target.checked;
      cursor = null;
      redraw();
    });
  }
}

// Returns a document as indented lines, without empty values and null.
function outline(value, indent = "") {
  const lines = [];
  for (const [key, inner] of Object.entries(value)) {
    if (inner === null || (typeof inner === "object" && !Object.keys(inner).length)) continue;
    if (typeof inner === "object" && !(Array.isArray(inner) && inner.every((item) => item === null || typeof item !== "object"))) {
      lines.push(`${indent}${key}:`, ...outline(inner, `${indent}  `));
    } else {
      lines.push(`${indent}${key}: ${Array.isArray(inner) ? `[${inner.join(", ")}]` : inner}`);
    }
  }
  return lines;
}
