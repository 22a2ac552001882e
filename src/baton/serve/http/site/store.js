// The samples of the last minutes, as columns for the plots. Bounded: what the server no longer keeps is dropped here too.

export class Store {
  constructor() { this.clear(); }

  clear() { this.samples = []; this.times = []; this.marks = []; this.requests = []; this.kept = 900; this.slo = null; this.hasLog = false; }

  add(sample) {
    this.samples.push(sample); this.times.push(sample.unix_s);
    if (this.samples.length > this.kept) { this.samples.shift(); this.times.shift(); }
    for (const text of sample.marks) this.marks.push({at: sample.unix_s, text});
    if (sample.counts.failovers) this.marks.push({at: sample.unix_s, text: `${sample.counts.failovers} requests went on elsewhere after a loss`});
    this.marks = this.marks.slice(-200);
    this.requests = [...this.requests, ...sample.ended].slice(-30);
    sample.ended = sample.marks = [];  // kept above: with them, the memory of the page grows with the rate of requests
  }

  column(values) { return this.samples.map(values); }

  last(seconds) {
    const from = (this.times.at(-1) ?? 0) - seconds;
    return this.samples.filter(sample => sample.unix_s > from);
  }

  // The sum of a count over the last seconds.
  sum(name, seconds) { return this.last(seconds).reduce((sum, sample) => sum + (sample.counts[name] ?? 0), 0); }

  nearest(at) {
    let best = null;
    for (const sample of this.samples) if (!best || Math.abs(sample.unix_s - at) < Math.abs(best.unix_s - at)) best = sample;
    return best;
  }

  workerNames() {
    const names = new Set();  // the present ones first, in the order of the table of workers
    for (const sample of [...this.samples].reverse()) for (const worker of sample.workers) names.add(worker.id);
    return [...names];
  }
}
