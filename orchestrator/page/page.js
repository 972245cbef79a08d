// Polls the view that the page's address names, and shows it: one job, all jobs, or a comparison. Cannot change a job.

const FORMAT = 2;
const HISTORY_FORMAT = 1;
const INDEX_FORMAT = 1;
const INTERVAL_MS = 1000;
const HISTORY_INTERVAL_MS = 4000;
const COMPARISON_INTERVAL_MS = 10000;
const HIDDEN_MS = 15000;
const TIMEOUT_MS = 5000;
const MAX_COMPARED = 8;
let place = null;
let newest = null;
let histories = [];
let historyReadAt = -Infinity;
let updatedAt = null;

function show(now) {
  byId("job").textContent = now.job;
  document.title = `${now.state} · ${now.job}`;
  byId("version").textContent = `rayzero ${now.version}` +
    (now.stage === null ? "" : ` · ZeRO stage ${now.stage}`) + ` · generation ${now.generation}`;
  const state = byId("state");
  if (state.textContent !== now.state) state.textContent = now.state;
  state.dataset.state = now.state;
  showProgress(now);
  const training = now.training;
  facts("training", [
    ["Loss", figure(training.loss)], ["Learning rate", figure(training.learning_rate)],
    ["Gradient norm", figure(training.gradient_norm)],
    ...(known(training.loss_scale) && training.loss_scale !== 1 ? [["Loss scale", figure(training.loss_scale)]] : []),
    ...(training.skipped_steps ? [["Skipped steps", count(training.skipped_steps)]] : []),
    ...(known(training.model_flops_utilization) ? [["Flops utilization", percent(training.model_flops_utilization)]] : []),
  ]);
  showRoles(now);
  showStreams(now);
  render("goodput", now.goodput, goodput);
  render("events", { faults: now.faults, recoveries: now.recoveries }, eventTable);
  render("checkpoints", now.checkpoints, checkpointTable);
  const replica = now.replicas;
  facts("replicas", [
    ["Replicated step", replica.step === null ? "none" : count(replica.step)],
    ["Replica size", bytes(replica.bytes)],
    ["Failed writes", count(now.checkpoint_failures)],
    ["Steps redone", count(now.steps_redone)],
  ]);
  render("phases", now.ranks.map((rank) => rank.phase), () => phaseLegend(now.ranks));
  render("ranks", now.ranks, rankTiles);
  draw(now);
}

function showProgress(now) {
  const { step, steps, remaining_s: left, step_s: stepTime, tokens_per_s: speed, samples_per_s: samples } = now.progress;
  const usage = now.usage || {}; // a run of an earlier version has none
  const done = steps ? Math.min(1, step / steps) : 0;
  byId("fill").style.width = `${100 * done}%`;
  const bar = byId("bar");
  bar.hidden = !steps;
  bar.setAttribute("aria-valuenow", (100 * done).toFixed(0));
  bar.setAttribute("aria-valuetext", `step ${count(step)} of ${count(steps)}`);
  facts("progress", [
    ["Step", steps ? `${count(step)} of ${count(steps)}` : count(step)],
    ["Time left", FINAL.includes(now.state) ? "–" : duration(left)],
    ["Running for", duration(now.at_s - now.began_s)],
    ["Step time", duration(stepTime)],
    ...(known(samples) ? [["Samples/s", rate(samples)]] : []),
    ...(known(speed) ? [["Tokens/s", rate(speed)]] : []),
    ...(known(usage.cpu_cores) ? [["CPU cores of a rank", figure(usage.cpu_cores, -1)]] : []),
    ...(known(usage.gpu_utilization) ? [["GPU use", percent(usage.gpu_utilization)]] : []),
    ["Ranks", `${count(now.world_size)} (of ${range(now.workers.min, now.workers.max)})`],
  ]);
}

function draw(now) {
  const until = FINAL.includes(now.state) ? now.state_since_s : now.at_s;
  const history = {
    began: now.began_s, until, generations: now.generations, faults: now.faults,
    checkpoints: now.checkpoints, maxWorkers: now.workers.max, title: "World size", noun: "rank",
    none: "No process group has formed yet.",
  };
  worldChart(byId("world"), history);
  drawLanes(now, until);
}

function showHistory(history) {
  showCurves([history]);
  showLog(history.log);
  render("config", history.config, (config) => [outline(config).join("\n")]);
}

// Shows the log. Keeps its end in view, unless the reader has scrolled up.
function showLog(lines) {
  const log = byId("log-tail");
  const follows = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
  render("log-tail", lines, () => [lines.length ? lines.join("\n") : "No line yet, or metrics.log_lines is 0."]);
  if (follows) log.scrollTop = log.scrollHeight;
}

function showConnection(kind, text) {
  const contact = byId("contact");
  contact.className = `contact ${kind}`;
  if (contact.textContent !== text) contact.textContent = text;
  document.body.classList.toggle("stale", kind === "lost");
}

class UnreadableError extends Error {}

async function fetchJson(url, format) {
  const response = await fetch(url, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (response.status === 404) throw new UnreadableError(`there is no ${url}: the job has written none yet`);
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  const value = await response.json();
  if (value.format !== format) throw new UnreadableError("the job runs another version than this page: reload it");
  return { value, age: Date.parse(response.headers.get("Date")) / 1000 - value.at_s };
}

// Returns the view that the page's address names. A job's own endpoint always shows that job, whose files have no folder.
function readPlace() {
  if (document.body.dataset.scope === "job") return { view: "job", jobs: [""] };
  const [, view, names] = location.hash.split("/");
  const jobs = (names || "").split(",").filter(Boolean).map(decodeURIComponent);
  if (view === "job" && jobs.length) return { view, jobs: jobs.slice(0, 1) };
  if (view === "compare" && jobs.length) return { view, jobs: jobs.slice(0, MAX_COMPARED) };
  return { view: "jobs", jobs: [] };
}

const fileOf = (job, name) => (job ? `jobs/${encodeURIComponent(job)}/${name}` : name);

function enter() {
  place = readPlace();
  newest = null;
  histories = [];
  historyReadAt = -Infinity;
  for (const part of document.querySelectorAll("[data-views]")) part.hidden = !part.dataset.views.split(" ").includes(place.view);
  byId("all-jobs").hidden = document.body.dataset.scope === "job" || place.view === "jobs";
  byId("compare").hidden = true;
  byId("all-keys-label").hidden = true;
  const [first] = place.jobs;
  byId("steps-csv").href = fileOf(first, "steps.csv");
  byId("steps-csv").download = `${first || "job"}-steps.csv`;
  listed = null;
  byId("charts").replaceChildren();
  for (const id of ["log-tail", "config", "jobs", "roles", "streams"]) { rendered.delete(id); byId(id).replaceChildren(); }
  plots.clear();
  cursor = null;
  byId("job").textContent = { jobs: "Jobs", compare: "Comparison", job: place.jobs[0] || "rayzero" }[place.view];
  byId("version").textContent = "";
  document.title = `rayzero · ${byId("job").textContent}`;
}

async function pollJob(here) {
  const { value: now, age } = await fetchJson(fileOf(here.jobs[0], "snapshot.json"), FORMAT);
  if (place !== here) return;
  const hasEnded = FINAL.includes(now.state) && !(newest && FINAL.includes(newest.state));
  newest = now;
  updatedAt = new Date();
  show(now);
  if (FINAL.includes(now.state)) showConnection("ended", "connected");
  else if (here.jobs[0] && age > STALE_S) showConnection("lost", `no news of the job for ${duration(age)}`);
  else showConnection("", "connected");
  if (!hasEnded && performance.now() - historyReadAt < HISTORY_INTERVAL_MS) return;
  const { value: history } = await fetchJson(fileOf(here.jobs[0], "history.json"), HISTORY_FORMAT);
  if (place !== here) return;
  historyReadAt = performance.now();
  histories = [history];
  showHistory(history);
}

async function pollJobs(here) {
  const { value: index } = await fetchJson("jobs.json", INDEX_FORMAT);
  if (place !== here) return;
  updatedAt = new Date();
  showConnection("", "connected");
  if (here.view === "jobs") {
    byId("version").textContent = index.folder;
    showJobs(index, index.jobs, null);
    return;
  }
  const colours = Object.fromEntries(here.jobs.map((name, index) => [name, LINE_COLOURS[index % LINE_COLOURS.length]]));
  showJobs(index, index.jobs.filter((job) => here.jobs.includes(job.name)), colours);
  if (performance.now() - historyReadAt < COMPARISON_INTERVAL_MS) return;
  const read = await Promise.allSettled(here.jobs.map((job) => fetchJson(fileOf(job, "history.json"), HISTORY_FORMAT)));
  if (place !== here) return;
  historyReadAt = performance.now();
  histories = here.jobs.flatMap((job, position) => {
    const answer = read[position].value; // undefined if the request failed
    return answer ? [{ ...answer.value, job, colour: colours[job] }] : [];
  });
  showCurves(histories);
}

async function poll() {
  const here = place;
  try {
    await (here.view === "job" ? pollJob(here) : pollJobs(here));
  } catch (error) {
    if (place !== here) return;
    const since = updatedAt ? `since ${updatedAt.toLocaleTimeString()}` : "yet";
    if (error instanceof UnreadableError) showConnection("lost", error.message);
    else if (newest && FINAL.includes(newest.state)) showConnection("ended", "the job has ended");
    else showConnection("lost", updatedAt ? `no response ${since}: these values are out of date` : "no response yet");
  }
}

async function follow() {
  await poll();
  setTimeout(follow, document.hidden ? HIDDEN_MS : INTERVAL_MS);
}

function redraw() {
  if (newest) draw(newest);
  if (histories.length) showCurves(histories);
}

enter();
onSettings(redraw);
onJobSettings();
addEventListener("resize", redraw);
addEventListener("hashchange", () => { enter(); poll(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
follow();
