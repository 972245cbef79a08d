// The list of all jobs, of which some can be selected to be compared.

const STALE_S = 60;
const selected = new Set();

function stateBadge(job, at) {
  const badge = element("span", { class: "state small", "data-state": job.state }, job.state);
  const silent = at - job.at_s;
  if (FINAL.includes(job.state) || silent < STALE_S) return [badge];
  return [badge, " ", element("span", { class: "quiet" }, `no news for ${duration(silent)}`)];
}

function shareBar(share) {
  const fill = element("span", {});
  fill.style.width = `${100 * Math.min(1, Math.max(0, share || 0))}%`;
  return element("span", { class: "meter" }, fill);
}

// `colours` by name: of the jobs that are compared. Without them each row has a box to select it.
function jobRow(job, at, colours) {
  const name = element("a", { href: `#/job/${encodeURIComponent(job.name)}` }, job.name);
  let mark = null;
  if (colours) {
    mark = element("span", { class: `spot k${(colours[job.name] || "c0").slice(1)}` });
  } else {
    mark = element("input", { type: "checkbox", "aria-label": `Select ${job.name}`, ...(job.has_curves ? {} : { disabled: "" }) });
    mark.checked = selected.has(job.name);
    mark.addEventListener("change", () => {
      if (mark.checked) selected.add(job.name); else selected.delete(job.name);
      showSelection();
    });
  }
  const running = !FINAL.includes(job.state);
  const cells = [
    ["", [mark]], ["Job", [name, ...(job.error ? [element("span", { class: "error" }, job.error)] : [])]],
    ["State", stateBadge(job, at)],
    ["Step", [job.steps ? `${count(job.step)} of ${count(job.steps)}` : count(job.step), ...(job.steps ? [shareBar(job.step / job.steps)] : [])]],
    ["Loss", [figure(job.loss)]], ["Tokens/s", [count(job.tokens_per_s)]], ["Step time", [duration(job.step_s)]],
    ["Goodput", [percent(job.goodput), shareBar(job.goodput)]], ["Ranks", [count(job.world_size)]], ["Faults", [count(job.faults)]],
    ["Took", [duration(job.wall_s), ...(running && known(job.remaining_s) ? [element("span", { class: "quiet" }, ` ${duration(job.remaining_s)} left`)] : [])]],
    ["Began", [new Date(job.began_s * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" })]],
  ];
  return element("tr", {}, ...cells.map(([label, content]) => element("td", { "data-label": label }, ...content)));
}

function showJobs(index, jobs, colours) {
  const key = [jobs, colours, jobs.map((job) => (FINAL.includes(job.state) ? 0 : Math.round((index.at_s - job.at_s) / STALE_S)))];
  render("jobs", key, () => {
    if (!jobs.length) return [element("p", { class: "none" }, `No job has written into ${index.folder} yet.`)];
    const rows = jobs.map((job) => jobRow(job, index.at_s, colours));
    const heads = [...rows[0].children].map((cell) => element("th", { scope: "col" }, cell.dataset.label));
    return [element("table", { class: "jobs" }, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows))];
  });
  showSelection();
}

function showSelection() {
  const names = [...selected];
  const link = byId("compare");
  link.hidden = names.length < 2 || place.view !== "jobs";
  link.textContent = `Compare ${names.length} jobs`;
  link.href = `#/compare/${names.map(encodeURIComponent).join(",")}`;
}
