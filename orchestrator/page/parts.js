// The parts of the page other than charts: functions that turn values into elements.

const PHASES = {
  forward: 1, backward: 2, reduce: 3, update: 4, data: 5, samples: 5, publish: 6, mirror: 8, checkpoint: 8,
  gather: 6, load: 7, join: 7, start: 7,
};
const NO_LABELS_FROM = 65;
const SILENT_S = 10;

const CAUSES = {
  productive: ["kgood", "steps that count"],
  redone: ["k3", "steps redone"],
  interrupted: ["kbad", "aborted by faults"],
  recovery: ["k6", "recovering from faults"],
  adoption: ["k6", "until the run was adopted"],
  waiting: ["kwarn", "waiting for workers"],
  resizing: ["k2", "resizing"],
  starting: ["k1", "starting"],
  data: ["k5", "waiting for data"],
  mirror: ["k8", "mirroring"],
  checkpoint: ["k4", "stopped for checkpoints"],
  finishing: ["k7", "finishing"],
  stopping: ["k7", "stopping"],
};

function goodput({ ratio, wall_s: wall, unattributed_s: unattributed, seconds }) {
  const sums = {};
  for (const [cause, spent] of Object.entries(seconds)) {
    const name = cause.startsWith("recovery_") ? "recovery" : cause;
    sums[name] = (sums[name] || 0) + spent;
  }
  const rows = Object.entries(sums).filter(([, spent]) => spent >= 5e-4);
  rows.sort(([left, spent], [right, other]) => (right === "productive") - (left === "productive") || other - spent);
  const parts = rows.map(([cause, spent]) => [...(CAUSES[cause] || ["k0", cause]), spent]);
  if (unattributed > 0) parts.push(["k0", "in progress", unattributed]);
  const bar = element("div", { class: "share", role: "img", "aria-label": `Goodput ${percent(ratio)}; the list below has the causes` });
  for (const [colour, name, spent] of parts) {
    const part = element("span", { class: colour, title: `${name}: ${duration(spent)}` });
    part.style.width = `${(100 * spent) / Math.max(wall, 1e-9)}%`;
    bar.append(part);
  }
  const legend = element("ul", { class: "legend" }, ...parts.map(([colour, name, spent]) =>
    element("li", {}, element("span", { class: `spot ${colour}` }), name,
      element("b", {}, `${duration(spent)} · ${percent(spent / Math.max(wall, 1e-9))}`))));
  const head = element("p", { class: "ratio" }, percent(ratio), " ",
    element("small", {}, `of ${duration(wall)} spent in steps that count`));
  return [head, bar, legend];
}

function phaseLegend(ranks) {
  const counts = new Map();
  for (const rank of ranks) {
    const phase = rank.phase || "unknown";
    counts.set(phase, (counts.get(phase) || 0) + 1);
  }
  return [...counts].sort().map(([phase, number]) =>
    element("li", {}, element("span", { class: `spot k${PHASES[phase] || 0}` }), phase, element("b", {}, count(number))));
}

function rankTiles(ranks) {
  const isMany = ranks.length >= NO_LABELS_FROM;
  byId("ranks").classList.toggle("many", isMany);
  if (!ranks.length) return [element("li", { class: "p0" }, "no rank has reported yet")];
  return ranks.map((rank) => {
    const silent = known(rank.silent_s) && rank.silent_s >= SILENT_S;
    const doing = `${rank.phase || "unknown"}${rank.waiting ? ", waiting" : ""}`;
    const more = [`step ${count(rank.step)}`];
    if (silent) more.push(`silent for ${duration(rank.silent_s)}`);
    else if (known(rank.step_s)) more.push(`${duration(rank.step_s)}/step`);
    if (!isMany && known(rank.cpu_cores)) more.push(`${figure(rank.cpu_cores, -2)} CPU cores`);
    if (!isMany && known(rank.gpu_utilization)) more.push(`GPU ${Math.round(100 * rank.gpu_utilization)} %`);
    const whole = `rank ${rank.rank}${rank.node ? ` on ${rank.node}` : ""}: ${doing}; ${more.join(", ")}` +
      (known(rank.resident_bytes) ? `; ${bytes(rank.resident_bytes)}` : "");
    const colour = PHASES[rank.phase] ? `b${PHASES[rank.phase]}` : "";
    return element("li", { class: `${colour} ${silent ? "silent" : ""}`, title: whole },
      element("strong", {}, `rank ${rank.rank}`), element("span", {}, rank.node || ""),
      element("span", { class: "doing" }, doing), ...more.map((line) => element("span", {}, line)));
  });
}

const RECOVERED = { repair: "repaired", resize: "resized", reattach: "re-attached" };

function eventTable({ faults, recoveries }) {
  const rows = [
    ...faults.map((fault) => [fault.at_s, "bad", fault.cause, fault.text]),
    ...recoveries.map((event) => [event.at_s, "good", RECOVERED[event.kind] || event.kind,
      `in ${duration(event.total_s)}: ${event.world_size_before} → ${event.world_size} ranks after step ${count(event.step)}` +
      (event.steps_redone ? `, ${count(event.steps_redone)} steps redone` : "")]),
  ];
  rows.sort(([left], [right]) => right - left);
  if (!rows.length) return [element("p", { class: "none" }, "No faults, no resizes.")];
  return [table(["Time", "Event", ""], rows.map(([at, style, kind, text]) => [
    element("td", { class: "when" }, clock(at)),
    element("td", { class: `kind ${style}` }, kind), element("td", {}, text)]))];
}

function checkpointTable(checkpoints) {
  if (!checkpoints.length) return [element("p", { class: "none" }, "This run has not written a checkpoint yet.")];
  return [table(["Time", "Step", "Size", "Duration"], [...checkpoints].reverse().map((checkpoint) => [
    element("td", { class: "when" }, clock(checkpoint.at_s)), element("td", {}, count(checkpoint.step)),
    element("td", {}, bytes(checkpoint.bytes)), element("td", {}, duration(checkpoint.seconds))]))];
}

function table(heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  return element("table", {}, element("thead", {}, head),
    element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells))));
}
