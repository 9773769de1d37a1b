// The live page: the current state of the engine. Polls once a second, only while the page is visible.
import { Host, Pages, Queue, Running, Tenants, Tree } from "./panels.js";
import { Chart, html, percent, render, seconds, Stat, ThemeButton, Title, useEffect, useMemo, useState, whole } from "./parts.js";

const INTERVAL_MS = 1000;

function useLive() {
  const [state, setState] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    let timer, ended = false;
    const poll = async () => {
      if (document.visibilityState === "visible") {
        try {
          const key = sessionStorage.getItem("key");
          const response = await fetch(`/live/state${location.search}`, key ? { headers: { Authorization: `Bearer ${key}` } } : {});
          if (!response.ok) throw Object.assign(new Error((await response.json()).error.message), { status: response.status });
          const found = await response.json();
          if (!ended) { setState(found); setProblem(null); }
        } catch (error) {
          if (!ended) setProblem(error);
        }
      }
      if (!ended) timer = setTimeout(poll, INTERVAL_MS);
    };
    poll();
    document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") { clearTimeout(timer); poll(); } });
    return () => { ended = true; clearTimeout(timer); };
  }, []);
  return [state, problem];
}

/** Turns cumulative counters into rates. Columns as in engine/monitor.py. */
function useSeries(samples, now) {
  return useMemo(() => {
    const times = [], decoded = [], computed = [], hits = [], running = [], waiting = [], p50 = [], p99 = [], acceptance = [], perRow = [];
    for (let i = 1; i < samples.length; i++) {
      const [before, after] = [samples[i - 1], samples[i]];
      const span = after[0] - before[0];
      if (span <= 0) continue;
      times.push(after[0] - now);
      decoded.push((after[1] - before[1]) / span);
      computed.push((after[2] - before[2]) / span);
      const prompts = after[3] - before[3];
      hits.push(prompts ? (after[4] - before[4]) / prompts : null);
      running.push(after[5]); waiting.push(after[6]);
      p50.push(after[7]); p99.push(after[8]);
      const outputs = after[1] - before[1], drafted = after[9] - before[9], accepted = after[10] - before[10];
      acceptance.push(drafted ? accepted / drafted : null);
      perRow.push(outputs > accepted ? outputs / (outputs - accepted) : null);
    }
    return { times, decoded, computed, hits, running, waiting, p50, p99, acceptance, perRow };
  }, [samples]);
}

const RECENT = [["request", "id of the request"], ["tenant", "its tenant"], ["finished", "how long ago it finished", "r"], ["prompt", "prompt tokens", "r"],
  ["cached", "of these, found in the prefix cache or fetched from host memory", "r"], ["output", "output tokens", "r"], ["waited", "time from arrival to first admission", "r"],
  ["TTFT", "time from arrival to the first token", "r"], ["TPOT", "mean time per output token after the first", "r"], ["finish reason", "why it ended; ↩: how often it was retracted", "last"]];

function Recent({ recent }) {
  return html`<section class="card w12"><${Title} name="Recent requests" title="The last requests that finished, for any reason">newest first<//>
    <div style="overflow-x:auto"><table class="plain"><thead><tr>${RECENT.map(([name, title, kind]) => html`<th class=${kind} title=${title}>${name}</th>`)}</tr></thead>
    <tbody>${recent.map(one => html`<tr key=${one.id + one.at}><td title=${one.id}>${one.id.length > 28 ? one.id.slice(0, 12) + "…" + one.id.slice(-10) : one.id}</td><td>${one.tenant}</td><td class="r">${seconds(one.ago)} ago</td>
      <td class="r">${whole(one.prompt)}</td><td class="r">${whole(one.cached)}</td><td class="r">${whole(one.output)}</td>
      <td class="r">${seconds(one.wait)}</td><td class="r">${seconds(one.ttft)}</td><td class="r">${seconds(one.tpot)}</td>
      <td class=${"last" + (one.reason === "stop" || one.reason === "length" ? "" : " warm")}>${one.reason}${one.retractions ? ` ↩${one.retractions}` : ""}</td></tr>`)}</tbody></table></div>
    ${!recent.length && html`<div class="empty">No request has finished yet.</div>`}</section>`;
}

function Page() {
  const [state, problem] = useLive();
  return state ? html`<${Board} state=${state} problem=${problem} />`
    : problem?.status === 401 ? html`<${KeyForm} />`
    : html`<main class="live"><div class="empty w12">${problem ? `The server does not respond: ${problem.message}` : "Loading…"}</div></main>`;
}

/** A server with API keys shows the requests of all tenants to its admin only. The key is kept in this tab. */
function KeyForm() {
  const keep = event => { event.preventDefault(); sessionStorage.setItem("key", event.target.elements.key.value); location.reload(); };
  return html`<main class="live"><form class="card w4" onSubmit=${keep}><${Title} name="Admin key" title="the value of admin_key of the server" />
    <p class="soft">This server uses API keys; this page needs the admin key.</p>
    <input name="key" type="password" aria-label="admin key" autofocus style="width:70%" /> <button class="btn main">Open</button></form></main>`;
}

function Board({ state, problem }) {
  const { snapshot, latency } = state;
  const series = useSeries(state.samples, state.now);
  const last = name => series[name].at(-1) ?? 0;
  const lastKnown = name => series[name].findLast(value => value !== null) ?? 0;
  const { memory, counters } = snapshot;
  const ended = Object.values(counters.finished).reduce((sum, count) => sum + count, 0);
  const ago = values => values.map(value => (value ? `−${seconds(-value)}` : "now"));
  return html`
    <header class="top"><img class="mark" src="/live/mark.svg" alt="" /><h1>Paceline</h1>
      <span class="sub">${[state.model, state.device].filter(Boolean).join(" · ")} · policy ${state.policy} · up ${seconds(state.uptime)}</span>
      <span class="end"><span class="soft" role="status"><i class=${"dot" + (problem ? " off" : "")}></i> ${problem ? `no response: ${problem.message}` : "live"}</span><${ThemeButton} /></span></header>
    <main class="live">
      <section class="card w12"><div class="stats">
        <${Stat} id="tokens_per_s" name="output tokens/s" value=${whole(last("decoded"))} title="output tokens per second since the previous sample, about a second ago" />
        <${Stat} id="prompt_tokens_per_s" name="prefill tokens/s" value=${whole(last("computed"))} title="prompt tokens computed per second since the previous sample, about a second ago" />
        <${Stat} id="ttft_p50" name="TTFT p50" value=${seconds(latency.ttft[0])} title="time to first token, median of the last 200 requests" />
        <${Stat} id="ttft_p99" name="TTFT p99" value=${seconds(latency.ttft[1])} title="time to first token, 99th percentile of the last 200 requests" />
        <${Stat} id="tpot_p50" name="TPOT p50" value=${seconds(latency.tpot[0])} title="time per output token after the first, median of the last 200 requests" />
        ${state.prefix_cache && html`<${Stat} id="hit_rate" name="prefix cache hit rate" value=${percent(counters.prompt_tokens ? counters.hit_tokens / counters.prompt_tokens : 0)} title="share of prompt tokens found in the prefix cache since the start" />`}
        ${state.speculates && html`<${Stat} id="acceptance" name="accepted drafts" value=${percent(lastKnown("acceptance"))} title=${`speculative decoding: share of the drafts that were verified, in the last seconds with any; since the start ${whole(counters.accepted_tokens)} of ${whole(counters.drafted_tokens)}`} />
        <${Stat} id="tokens_per_row" name="tokens per row" value=${lastKnown("perRow").toFixed(2)} title="output tokens of a decode row in a forward pass, in the last seconds with any: one, and the accepted drafts" />`}
        <${Stat} id="kv" name="KV cache usage" value=${percent(1 - (memory.free + memory.cached) / memory.pages)} title="share of pages that running requests use or that are pinned" />
        <${Stat} id="ended" name="finished requests" value=${whole(ended)} title="since the start, with any finish reason" />
        <${Stat} id="retractions" name="retractions" value=${whole(counters.retractions)} title="running requests that gave their memory back and waited again, since the start" />
      </div></section>
      <section class="card w4"><${Chart} name="Tokens per second" title="between two samples, about a second apart" times=${series.times} xFormat=${ago} xEnd=${0} series=${[{ name: "output", values: series.decoded, colour: "--good", title: "output tokens" }, { name: "prefill", values: series.computed, colour: "--accent", dash: [5, 4], title: "prompt tokens computed" }]} /></section>
      <section class="card w4"><${Chart} name="TTFT" title="time to first token of the requests that finished in the 30 s before" times=${series.times} xFormat=${ago} xEnd=${0} format=${seconds} series=${[{ name: "p50", values: series.p50, colour: "--accent", title: "median" }, { name: "p99", values: series.p99, colour: "--warm", dash: [5, 4], title: "99th percentile" }]} /></section>
      <section class="card w4"><${Chart} name="Requests" title="running and waiting requests" times=${series.times} xFormat=${ago} xEnd=${0} series=${[{ name: "running", values: series.running, colour: "--accent", title: "requests with a slot" }, { name: "waiting", values: series.waiting, colour: "--warm", dash: [5, 4], title: "requests in the queue" }]} /></section>
      <div class="w6"><${Queue} snapshot=${snapshot} /></div><div class="w6"><${Running} snapshot=${snapshot} /></div>
      <div class="w6 stack"><${Pages} snapshot=${snapshot} hint=${`of ${state.page_size} tokens`} /><${Host} snapshot=${snapshot} /><${Tenants} tenants=${snapshot.tenants} /></div>
      ${state.prefix_cache && html`<div class="w6"><${Tree} snapshot=${snapshot} /></div>`}
      <${Recent} recent=${state.recent} />
      <section class="card w6"><${Title} name="Since the start" title="counters of the engine" /><table class="plain"><tbody>
        ${totals(counters, snapshot.host, state.speculates).map(([name, value, title]) => html`<tr title=${title}><td>${name}</td><td class="r">${whole(value)}</td></tr>`)}</tbody></table></section></main>`;
}

function totals(counters, host, speculates) {
  return [["requests", counters.added, "accepted requests"], ["refused", counters.refused, "requests that were refused by the scheduler"], ["forward passes", counters.steps, "passes that were planned"],
    ["prompt tokens admitted", counters.prompt_tokens, "of admitted requests; a retracted request counts again when it is readmitted"], ["prompt tokens cached", counters.hit_tokens, "of these, found in the prefix cache"],
    host && ["prompt tokens fetched", counters.fetched_tokens, "of these, fetched from host memory"], ["prompt tokens computed", counters.computed_tokens, "computed, or planned to be"], ["output tokens", counters.decoded_tokens, "sampled in decode batches; the first token of a request comes with its prefill"],
    speculates && ["drafts verified", counters.drafted_tokens, "draft tokens that forward passes verified (speculative decoding)"], speculates && ["drafts accepted", counters.accepted_tokens, "of these, accepted; they are among the output tokens"],
    ["pages evicted", counters.evicted_pages, "cached pages that were given to other requests"], host && ["pages spilled", counters.spilled_pages, "of these, copied to host memory"]].filter(Boolean);
}

render(html`<${Page} />`, document.body);
