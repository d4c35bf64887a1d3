// What a page hears from the server: one event stream while the page is seen, so that hidden tabs use up none of a
// browser's connections. It is opened again where it was left when its topics change or it breaks.
const KINDS = ["list", "run", "log", "reload", "reset"];
const WAITS = [500, 1000, 2000, 4000, 8000, 15000];

export class Stream {
  constructor(tell) {
    this.tell = tell;
    this.topics = new Set();
    this.last = "";
    this.up = true;
    this.failed = 0;
    this.source = null;
    this.timer = 0;
  }

  follow(topics) {
    const same = topics.size === this.topics.size && [...topics].every((topic) => this.topics.has(topic));
    // A stream that was ended for good begins again when somebody has logged in and asks for the same.
    if (same && this.source) return;
    this.topics = topics;
    clearTimeout(this.timer);
    // A page asks for its topics in one go.
    this.timer = setTimeout(() => this.open(), 50);
  }

  close() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.source?.close();
    this.source = null;
  }

  open() {
    this.close();
    if (!this.topics.size) { this.last = ""; return; }
    const source = new EventSource(`/api/events?topics=${listed(this.topics, this.last)}`);
    this.source = source;
    source.addEventListener("open", () => this.line(true));
    source.addEventListener("error", () => this.again());
    source.addEventListener("bye", (event) => this.end(JSON.parse(event.data)));
    for (const kind of KINDS) source.addEventListener(kind, (event) => this.take(kind, event));
  }

  take(kind, event) {
    if (event.lastEventId) this.last = event.lastEventId;
    this.tell({ kind, data: JSON.parse(event.data) });
  }

  end(data) {
    this.close();
    this.line(false);
    this.tell({ kind: "bye", data });
  }

  // We open it again ourselves: a browser gives up for good after some answers, such as a proxy's 502.
  again() {
    this.close();
    this.line(false);
    const wait = WAITS[Math.min(this.failed, WAITS.length - 1)];
    this.failed += 1;
    this.timer = setTimeout(() => this.retry(), wait * (0.75 + Math.random() / 2));
  }

  // An event source does not tell what it was answered. A session that has ended meanwhile does not come back by itself.
  async retry() {
    const { timer } = this;
    const answer = await fetch("/api/session", { signal: AbortSignal.timeout(10000) }).catch(() => null);
    // The stream was closed or asked for anew while the answer was on its way.
    if (this.timer !== timer) return;
    if (answer?.status === 401) this.end({ reason: "You are logged out: load the page again to log in." });
    else this.open();
  }

  line(up) {
    if (up) this.failed = 0;
    if (this.up === up) return;
    this.up = up;
    this.tell({ kind: "line", up });
  }
}

// Each topic once, at the position that the stream has reached, or else where its page begins. Proxies take addresses of
// 8 KiB, so what an address may hold as it is stays as it is.
const listed = (topics, last) => {
  const reached = new Map(last.split(",").map((one) => one.split("@")));
  const begin = new Map([...topics].map((one) => one.split("@")));
  const words = [...begin].map(([name, at]) => [name, reached.get(name) ?? at].filter((part) => part !== undefined).join("@"));
  return encodeURIComponent(words.sort().join(",")).replace(/%(2C|3A|40)/g, decodeURIComponent);
};

const hears = new Map();

const stream = new Stream(({ kind, up, data }) => {
  const offline = document.getElementById("offline");
  if (kind === "line") offline.hidden = up;
  else if (kind === "reload" || kind === "reset") hears.get(data.topic)?.hear({ rows: [], again: true });
  else if (kind === "bye") {
    offline.textContent = data.reason;
    offline.hidden = false;
  } else {
    const name = kind === "run" ? `run:${data.id}` : kind === "log" ? `log:${data.id}:${data.rank}` : kind;
    hears.get(name)?.hear(data);
  }
});

const send = () => {
  if (document.hidden) stream.close();
  else stream.follow(new Set([...hears.values()].map((one) => one.topic)));
};
document.addEventListener("visibilitychange", send);

export const subscribe = (topic, hear) => {
  hears.set(topic.split("@")[0], { topic, hear });
  send();
};

export const unsubscribe = (name) => {
  if (hears.delete(name)) send();
};
