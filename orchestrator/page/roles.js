// The roles of a job: a lane for each role, with its workers over time, and the contents of the rollout buffer.

function showRoles(now) {
  const roles = Object.entries(now.roles || {}); // a run of an earlier version has none
  byId("roles-part").hidden = !roles.length;
  render("roles", roles.map(([name]) => name), (names) => names.map(newLane));
  const rollouts = now.rollouts;
  facts("rollouts", rollouts ? [
    ["Version", count(rollouts.published)],
    ["Lag of the newest batch", `${figure(rollouts.lag_mean)} (max ${count(rollouts.lag_max)} of ${count(rollouts.max_version_lag)})`],
    ["Ready prompts", count(rollouts.ready)],
    ["Read prompts", count(rollouts.read)],
    ["Buffer", `${bytes(rollouts.nbytes)} of ${bytes(rollouts.max_bytes)}`],
  ] : []);
  for (const [name, role] of roles) facts(`lane-${name}-facts`, laneFacts(name, role, rollouts));
  render("role-events", roles.flatMap(([, role]) => role.seen_faults || []),
    (faults) => eventTable({ faults, recoveries: [] }));
}

function newLane(name) {
  return element("div", { class: "lane" },
    element("figure", { id: `lane-${name}`, class: "chart" },
      element("figcaption", {}, element("b", {}, name), element("span", { class: "readout" })),
      element("div", { class: "plot" })),
    element("dl", { id: `lane-${name}-facts`, class: "facts small" }));
}

function laneFacts(name, role, rollouts) {
  const tasks = rollouts && rollouts.leased[name] !== undefined ? rollouts : null;
  const behind = rollouts && known(role.version) ? Math.max(0, rollouts.published - role.version) : null;
  return [
    ["Workers", `${count(role.workers)} (of ${range(role.min, role.max)})`],
    ...(role.finished ? [["Finished", count(role.finished)]] : []),
    ...(tasks ? [["Tasks in flight", `${count(tasks.leased[name])}, ${count(tasks.waiting[name])} wait`]] : []),
    ...(tasks && tasks.expired[name] ? [["Tasks given again", count(tasks.expired[name])]] : []),
    ...(known(role.version) ? [["Oldest weights", `step ${count(role.version)}${behind ? `, ${count(behind)} behind` : ""}`]] : []),
    ...(known(role.tokens_per_s) ? [["Tokens/s", rate(role.tokens_per_s)]] : []),
    ...Object.entries(role.values || {}).map(([value, spread]) =>
      [value, figure(spread.mean) + (spread.high > spread.low ? ` (${figure(spread.low)} to ${figure(spread.high)})` : "")]),
  ];
}

function drawLanes(now, until) {
  for (const [name, role] of Object.entries(now.roles || {})) {
    worldChart(byId(`lane-${name}`), {
      began: now.began_s, until, generations: role.generations || [], faults: role.seen_faults || [], checkpoints: [],
      maxWorkers: role.max, title: `Workers of ${name}`, noun: "worker", none: "No worker runs yet.",
    });
  }
}
