// One event stream for all tabs of this browser. Each tab is a port with its topics; the stream has the topics of all.
import { Stream } from "./one-stream.js";

const tabs = new Map();
const stream = new Stream((topic, message) => {
  for (const [port, topics] of tabs) if (topic === null || topics.some((one) => one.split("@")[0] === topic)) port.postMessage(message);
});
const refresh = () => stream.follow(new Set([...tabs.values()].flat()));

self.addEventListener("connect", (event) => {
  const port = event.ports[0];
  tabs.set(port, []);
  port.addEventListener("message", ({ data }) => {
    if (data.lock) {
      // The tab holds this lock as long as it lives; it is ours when the tab is gone, however it went.
      self.navigator.locks.request(data.lock, () => { tabs.delete(port); refresh(); });
    } else {
      tabs.set(port, data.topics);
      refresh();
      port.postMessage({ kind: "line", up: stream.up });
    }
  });
  port.start();
});
