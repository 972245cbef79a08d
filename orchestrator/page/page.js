// Asks for the snapshot again and again, and shows it. Nothing here can change the job.

const FORMAT = 2;
const EVERY_MS = 1000;
const HIDDEN_MS = 15000;
const ANSWER_MS = 5000;
const FINAL = ["succeeded", "failed", "stopped"];
let newest = null;
let heardAt = null;

function show(now) {
  byId("job").textContent = now.job;
  document.title = `${now.state} · ${now.job}`;
  byId("made").textContent = `rayzero ${now.version}` +
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
    ...(known(training.model_flops_utilization) ? [["Flops used", percent(training.model_flops_utilization)]] : []),
  ]);
  put("goodput", now.goodput, goodput);
  put("events", { faults: now.faults, recoveries: now.recoveries }, happened);
  put("checkpoints", now.checkpoints, saved);
  const replica = now.replicas;
  facts("replicas", [
    ["Replica of step", replica.step === null ? "none" : count(replica.step)],
    ["Replicas hold", bytes(replica.bytes)],
    ["Failed tries", count(now.checkpoint_failures)],
    ["Steps done again", count(now.steps_redone)],
  ]);
  put("phases", now.ranks.map((one) => one.phase), () => phaseLegend(now.ranks));
  put("ranks", now.ranks, rankTiles);
  draw(now);
}

function showProgress(now) {
  const { step, steps, remaining_s: left, step_s: pace, tokens_per_s: speed } = now.progress;
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
    ["Step time", duration(pace)],
    ...(known(speed) ? [["Tokens/s", count(speed)]] : []),
    ["Ranks", `${count(now.world_size)} (of ${range(now.workers.min, now.workers.max)})`],
  ]);
}

function draw(now) {
  put("loss", [byId("loss").clientWidth, now.loss], () => lossChart(now.loss));
  const until = FINAL.includes(now.state) ? now.state_since_s : now.at_s;
  const seen = {
    began: now.began_s, until, generations: now.generations, faults: now.faults,
    checkpoints: now.checkpoints, most: now.workers.max,
  };
  put("world", [byId("world").clientWidth, seen], () => worldChart(seen));
}

function tell(kind, text) {
  const contact = byId("contact");
  contact.className = `contact ${kind}`;
  if (contact.textContent !== text) contact.textContent = text;
  document.body.classList.toggle("stale", kind === "lost");
}

async function ask() {
  const stop = new AbortController();
  const limit = setTimeout(() => stop.abort(), ANSWER_MS);
  try {
    const answer = await fetch("snapshot.json", { cache: "no-store", signal: stop.signal });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const now = await answer.json();
    if (now.format !== FORMAT) {
      tell("lost", "this page is older than the job: reload it");
      return;
    }
    newest = now;
    heardAt = new Date();
    show(now);
    tell(FINAL.includes(now.state) ? "ended" : "", "in contact");
  } catch {
    const since = heardAt ? `since ${heardAt.toLocaleTimeString()}` : "yet";
    if (newest && FINAL.includes(newest.state)) tell("ended", "the job has ended, and serves no more");
    else tell("lost", heardAt ? `no contact ${since}: these numbers are old` : "no contact yet");
  } finally {
    clearTimeout(limit);
  }
}

async function follow() {
  await ask();
  setTimeout(follow, document.hidden ? HIDDEN_MS : EVERY_MS);
}

addEventListener("resize", () => { if (newest) draw(newest); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
follow();
