// The parts of the page that are no charts: each is told what it shows, and gives its elements.

const PHASES = {
  forward: 1, backward: 2, reduce: 3, update: 4, data: 5, publish: 6, mirror: 8, checkpoint: 8,
  gather: 6, load: 7, join: 7, start: 7,
};
const NO_LABELS_FROM = 65;
const SILENT_S = 10;

const CAUSES = {
  productive: ["kgood", "steps that count"],
  redone: ["k3", "steps done again"],
  interrupted: ["kbad", "broken off by faults"],
  recovery: ["k6", "recovering from faults"],
  adoption: ["k6", "lost, not adopted yet"],
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
  rows.sort(([one, spent], [other, lost]) => (other === "productive") - (one === "productive") || lost - spent);
  const parts = rows.map(([cause, spent]) => [...(CAUSES[cause] || ["k0", cause]), spent]);
  if (unattributed > 0) parts.push(["k0", "in progress", unattributed]);
  const bar = element("div", { class: "share", role: "img", "aria-label": `Goodput ${percent(ratio)}; the list below has the parts` });
  for (const [colour, name, spent] of parts) {
    const part = element("span", { class: colour, title: `${name}: ${duration(spent)}` });
    part.style.width = `${(100 * spent) / Math.max(wall, 1e-9)}%`;
    bar.append(part);
  }
  const legend = element("ul", { class: "legend" }, ...parts.map(([colour, name, spent]) =>
    element("li", {}, element("span", { class: `spot ${colour}` }), name,
      element("b", {}, `${duration(spent)} · ${percent(spent / Math.max(wall, 1e-9))}`))));
  const head = element("p", { class: "ratio" }, percent(ratio), " ",
    element("small", {}, `of ${duration(wall)} went into steps that count`));
  return [head, bar, legend];
}

function phaseLegend(ranks) {
  const found = new Map();
  for (const one of ranks) {
    const phase = one.phase || "unknown";
    found.set(phase, (found.get(phase) || 0) + 1);
  }
  return [...found].sort().map(([phase, many]) =>
    element("li", {}, element("span", { class: `spot k${PHASES[phase] || 0}` }), phase, element("b", {}, count(many))));
}

function rankTiles(ranks) {
  byId("ranks").classList.toggle("many", ranks.length >= NO_LABELS_FROM);
  if (!ranks.length) return [element("li", { class: "p0" }, "no rank has said anything yet")];
  return ranks.map((one) => {
    const silent = known(one.silent_s) && one.silent_s >= SILENT_S;
    const doing = `${one.phase || "unknown"}${one.waiting ? ", waiting" : ""}`;
    const more = [`step ${count(one.step)}`];
    if (silent) more.push(`silent for ${duration(one.silent_s)}`);
    else if (known(one.step_s)) more.push(`${duration(one.step_s)}/step`);
    const whole = `rank ${one.rank}${one.node ? ` on ${one.node}` : ""}: ${doing}; ${more.join(", ")}` +
      (known(one.resident_bytes) ? `; ${bytes(one.resident_bytes)}` : "");
    const colour = PHASES[one.phase] ? `b${PHASES[one.phase]}` : "";
    return element("li", { class: `${colour} ${silent ? "silent" : ""}`, title: whole },
      element("strong", {}, `rank ${one.rank}`), element("span", {}, one.node || ""),
      element("span", { class: "doing" }, doing), ...more.map((line) => element("span", {}, line)));
  });
}

function happened({ faults, recoveries }) {
  const rows = [
    ...faults.map((one) => [one.at_s, "bad", one.cause, one.text]),
    ...recoveries.map((one) => [one.at_s, "good", one.kind === "repair" ? "repaired" : "resized",
      `in ${duration(one.total_s)}: ${one.world_size_before} → ${one.world_size} ranks after step ${count(one.step)}` +
      (one.steps_redone ? `, ${count(one.steps_redone)} steps done again` : "")]),
  ];
  rows.sort(([one], [other]) => other - one);
  if (!rows.length) return [element("p", { class: "none" }, "No fault, no resize.")];
  return [table(["When", "What", ""], rows.map(([at, mood, kind, text]) => [
    element("td", { class: "when" }, clock(at)),
    element("td", { class: `kind ${mood}` }, kind), element("td", {}, text)]))];
}

function saved(checkpoints) {
  if (!checkpoints.length) return [element("p", { class: "none" }, "No checkpoint has been written by this run.")];
  return [table(["When", "Step", "Size", "Took"], [...checkpoints].reverse().map((one) => [
    element("td", { class: "when" }, clock(one.at_s)), element("td", {}, count(one.step)),
    element("td", {}, bytes(one.bytes)), element("td", {}, duration(one.seconds))]))];
}

function table(heads, rows) {
  const head = element("tr", {}, ...heads.map((one) => element("th", { scope: "col" }, one)));
  return element("table", {}, element("thead", {}, head),
    element("tbody", {}, ...rows.map((cells) => element("tr", {}, ...cells))));
}
