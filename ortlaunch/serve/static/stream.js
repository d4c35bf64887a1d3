// What a page hears from the server. All tabs share one stream in a SharedWorker. A browser without these opens one
// for the tab that is seen, so that hidden tabs cannot use up its connections.
import { Stream } from "./one-stream.js";

const hears = new Map();
let connection = null;

export const subscribe = (topic, hear) => {
  const name = topic.split("@")[0];
  hears.set(name, { topic, hear });
  connection ??= connect();
  connection.send();
};

export const unsubscribe = (name) => {
  if (hears.delete(name)) connection?.send();
};

const topics = () => [...hears.values()].map((one) => one.topic);

const take = ({ kind, up, data }) => {
  const offline = document.getElementById("offline");
  if (kind === "line") offline.hidden = up;
  else if (kind === "reload" || kind === "reset") hears.get(data.topic.split("@")[0])?.hear({ rows: [], again: true });
  else if (kind === "bye") {
    offline.textContent = data.reason;
    offline.hidden = false;
  } else {
    const name = kind === "run" ? `run:${data.id}` : kind === "log" ? `log:${data.id}:${data.rank}` : kind;
    hears.get(name)?.hear(data);
  }
};

const connect = () => (window.SharedWorker && navigator.locks ? shared() : own());

const shared = () => {
  const worker = new SharedWorker("/static/stream-worker.js", { type: "module", name: "ortlaunch" });
  worker.port.addEventListener("message", ({ data }) => take(data));
  worker.port.start();
  const lock = `tab-${crypto.randomUUID()}`;
  navigator.locks.request(lock, () => {
    worker.port.postMessage({ lock });
    return new Promise(() => {});
  });
  return { send: () => worker.port.postMessage({ topics: topics() }) };
};

const own = () => {
  const stream = new Stream((_, message) => take(message));
  // A tab that is opened in the background names its topics when it is shown.
  const send = () => {
    if (document.hidden) stream.close();
    else stream.follow(new Set(topics()));
  };
  document.addEventListener("visibilitychange", send);
  return { send };
};
