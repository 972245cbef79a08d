// The table of all jobs: sorted by any column, filtered, with boxes that select jobs for a comparison.

const STALE_S = 60;
const MAX_KEYS = 4;
const selected = new Set();
const order = { column: null, descending: false };
let listed = null; // the arguments of showJobs

const isBad = (job) => job.state === "failed" || job.state === "unreadable";

function stateBadge(job, at) {
  const badge = element("span", { class: "state small", "data-state": job.state }, job.state);
  const silent = at - job.at_s;
  if (FINAL.includes(job.state) || isBad(job) || silent < STALE_S) return [badge];
  return [badge, " ", element("span", { class: "quiet" }, `no news for ${duration(silent)}`)];
}

function shareBar(share) {
  const fill = element("span", {});
  fill.style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`;
  return element("span", { class: "meter" }, fill);
}

function nameOf(job) {
  const link = element("a", { href: `#/job/${encodeURIComponent(job.name)}`, "data-focus": `job ${job.name}` }, job.name);
  return [link, ...(job.error ? [element("span", { class: isBad(job) ? "error" : "remark" }, job.error)] : [])];
}

const timeLeft = (job) => (FINAL.includes(job.state) || !known(job.remaining_s) ? [] : [element("span", { class: "quiet" }, ` ${duration(job.remaining_s)} left`)]);

// Rows are sorted by `value`; `show` makes the content of a cell. `at` is the Unix time of the index.
// An `optional` column is left out if no job has a value.
const JOB_COLUMNS = [
  { label: "Job", value: (job) => job.name, show: nameOf },
  { label: "State", value: (job) => job.state, show: (job, at) => stateBadge(job, at) },
  { label: "Age", value: (job, at) => at - job.began_s, show: (job, at) => [element("span", { title: new Date(job.began_s * 1000).toLocaleString() }, duration(at - job.began_s))] },
  { label: "Step", value: (job) => job.step, show: (job) => [job.steps ? `${count(job.step)} of ${count(job.steps)}` : count(job.step), ...(job.steps ? [shareBar(job.step / job.steps)] : [])] },
  { label: "Loss", value: (job) => job.loss, show: (job) => [figure(job.loss)] },
  { label: "Samples/s", value: (job) => job.samples_per_s, show: (job) => [rate(job.samples_per_s)], optional: true },
  { label: "Tokens/s", value: (job) => job.tokens_per_s, show: (job) => [rate(job.tokens_per_s)], optional: true },
  { label: "Step time", value: (job) => job.step_s, show: (job) => [duration(job.step_s)] },
  { label: "CPU cores", value: (job) => job.cpu_cores, show: (job) => [figure(job.cpu_cores, -1)], optional: true },
  { label: "GPU use", value: (job) => job.gpu_utilization, show: (job) => [percent(job.gpu_utilization)], optional: true },
  { label: "Goodput", value: (job) => job.goodput, show: (job) => [percent(job.goodput), shareBar(job.goodput)] },
  { label: "Ranks", value: (job) => job.world_size, show: (job) => [count(job.world_size)] },
  { label: "Faults", value: (job) => job.faults, show: (job) => [count(job.faults)] },
  { label: "Took", value: (job) => job.wall_s, show: (job) => [duration(job.wall_s), ...timeLeft(job)] },
];

const settingText = (value) => (value === undefined ? "–" : String(value));

// Returns the keys of the job files whose values differ between the jobs shown, keys of the training first.
function differingKeys(jobs) {
  const configs = jobs.map((job) => job.config).filter((config) => Object.keys(config).length);
  const keys = [...new Set(configs.flatMap(Object.keys))];
  const isOfTraining = (key) => /^(engine|args)\./.test(key);
  return keys.filter((key) => configs.some((config) => config[key] !== configs[0][key]))
    .sort((left, right) => isOfTraining(right) - isOfTraining(left));
}

const keyColumn = (key) => ({
  label: key.replace(/^engine\./, ""), title: key, value: (job) => job.config[key], show: (job) => [element("span", { class: "setting" }, settingText(job.config[key]))],
});

function matches(job, words) {
  const settings = Object.entries(job.config).map(([key, value]) => `${key}=${value}`);
  const text = [job.name, job.state, job.error, ...settings].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

// Unknown values come last in either direction.
function sortJobs(jobs, columns, at) {
  const column = columns.find((candidate) => candidate.label === order.column);
  if (!column) return jobs;
  const isKnown = (value) => value !== null && value !== undefined;
  return [...jobs].sort((left, right) => {
    const [first, second] = [column.value(left, at), column.value(right, at)];
    if (!isKnown(first) || !isKnown(second)) return isKnown(second) - isKnown(first);
    const ascending = known(first) && known(second) ? first - second : String(first).localeCompare(String(second), "en", { numeric: true });
    return order.descending ? -ascending : ascending;
  });
}

function sortBy(label) {
  if (order.column !== label) Object.assign(order, { column: label, descending: false });
  else if (!order.descending) order.descending = true;
  else order.column = null; // back to the order of the index, the newest job first
  showJobs(...listed);
}

function headOf(column) {
  const direction = order.column === column.label ? (order.descending ? "descending" : "ascending") : "none";
  const control = element("button", { type: "button", "data-focus": `sort ${column.label}`, ...(column.title ? { title: column.title } : {}) }, column.label);
  control.addEventListener("click", () => sortBy(column.label));
  return element("th", { scope: "col", "aria-sort": direction }, control);
}

// Returns the mark of a row: the colour of a job in a comparison (`colours`, by name), or a box that selects the job.
function markOf(job, colours) {
  if (colours) return element("span", { class: `spot k${(colours[job.name] || "c0").slice(1)}` });
  const mark = element("input", { type: "checkbox", "aria-label": `Select ${job.name}`, "data-focus": `select ${job.name}`, ...(job.has_curves ? {} : { disabled: "" }) });
  mark.checked = selected.has(job.name);
  mark.addEventListener("change", () => {
    if (mark.checked) selected.add(job.name); else selected.delete(job.name);
    showSelection();
  });
  return mark;
}

function jobRow(job, columns, at, colours) {
  return element("tr", {}, element("td", {}, markOf(job, colours)),
    ...columns.map((column) => element("td", { "data-label": column.label }, ...column.show(job, at))));
}

function showJobs(index, jobs, colours) {
  listed = [index, jobs, colours];
  const words = colours ? [] : byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = jobs.filter((job) => matches(job, words));
  const keys = differingKeys(shown);
  const shownKeys = byId("all-keys").checked ? keys : keys.slice(0, MAX_KEYS);
  byId("all-keys-label").hidden = keys.length <= MAX_KEYS;
  byId("all-keys-label").querySelector("span").textContent = `All ${keys.length} settings that differ`;
  const columns = JOB_COLUMNS.filter((column) => !column.optional || shown.some((job) => known(column.value(job, index.at_s))));
  columns.splice(columns.findIndex((column) => column.label === "Loss") + 1, 0, ...shownKeys.map(keyColumn));
  const sorted = sortJobs(shown, columns, index.at_s);
  const focused = document.activeElement && document.activeElement.dataset.focus;
  render("jobs", [sorted, colours, order, shownKeys, Math.round(index.at_s / STALE_S)], () => {
    if (!jobs.length) return [element("p", { class: "none" }, `No job has written into ${index.folder} yet.`)];
    if (!sorted.length) return [element("p", { class: "none" }, `None of ${count(jobs.length)} jobs matches the filter.`)];
    const heads = element("tr", {}, element("th", { scope: "col" }), ...columns.map(headOf));
    return [element("table", { class: "jobs" }, element("thead", {}, heads),
      element("tbody", {}, ...sorted.map((job) => jobRow(job, columns, index.at_s, colours))))];
  });
  if (focused) [...document.querySelectorAll("[data-focus]")].find((control) => control.dataset.focus === focused)?.focus({ preventScroll: true });
  showSelection();
}

function showSelection() {
  const names = [...selected];
  const link = byId("compare");
  link.hidden = names.length < 2 || place.view !== "jobs";
  link.textContent = `Compare ${names.length} jobs`;
  link.href = `#/compare/${names.map(encodeURIComponent).join(",")}`;
}

function onJobSettings() {
  for (const id of ["filter", "all-keys"]) byId(id).addEventListener("input", () => { if (listed) showJobs(...listed); });
}
