// The sources of a job's streams: the amounts that are read, and their curves.

function showStreams(now) {
  const sources = Object.entries(now.streams || {}); // a run of an earlier version has none
  byId("streams-part").hidden = !sources.length;
  if (!sources.length) return;
  const sum = (name) => sources.reduce((total, [, source]) => total + (source[name] || 0), 0);
  facts("stream-facts", [
    ["Waiting for data", `${share(now.progress.data_wait_ratio)} of a step`],
    ["Samples", count(sum("samples"))], ["Samples/s", rate(sum("samples_per_s"))],
    ["Read", bytes(sum("bytes"))], ["Read/s", bytes(sum("bytes_per_s"))],
  ]);
  render("streams", sources, sourceTable);
}

function sourceTable(sources) {
  const heads = ["Source", "Share", "Samples", "Samples/s", "Blocks read", "Read/s", "Found in memory"];
  return [table(heads, sources.map(([name, source]) => [
    element("td", { class: "kind" }, name),
    ...[share(source.share), count(source.samples), rate(source.samples_per_s), count(source.blocks),
      bytes(source.bytes_per_s), percent(source.hit_ratio)].map((text) => element("td", {}, text))]))];
}

// Returns the charts of streams. With several sources, one shows their shares of the mixture, stacked.
function streamCharts(names, histories) {
  const byKind = (kind) => Object.fromEntries([...names].sort()
    .filter((name) => name.startsWith("streams/") && name.endsWith(`/${kind}`))
    .map((name) => [name, name.slice("streams/".length, -kind.length - 1)]));
  const [samples, read] = [byKind("samples_per_s"), byKind("bytes_per_s")];
  const isMixture = Object.keys(samples).length > 1 && !isComparison(histories);
  return [
    ...(isMixture ? [{ id: "shares", title: "Samples/s by source", curves: samples, format: rate, stacked: true }] : []),
    ...(Object.keys(read).length ? [{ id: "read", title: "Read a second", curves: read, format: bytes }] : []),
  ];
}
