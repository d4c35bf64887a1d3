// The log of one rank: its end first, then what the stream brings, joined by byte offsets so that nothing is lost or
// shown twice. Lines are text nodes; nothing of a log can become markup.
import { ApiError, call, say } from "./api.js";
import { element, logLine } from "./format.js";
import { subscribe, unsubscribe } from "./stream.js";

const CHUNK = 65536;
const MOST_LINES = 5000;

export class Log {
  constructor(id, place) {
    this.id = id;
    this.box = place.querySelector(".log");
    this.rank = place.querySelector("[name=rank]");
    this.follow = place.querySelector("[name=follow]");
    this.earlier = place.querySelector("[data-do=earlier]");
    this.found = place.querySelector(".found");
    this.search = place.querySelector("form");
    this.note = place.querySelector("output");
    this.download = place.querySelector("[data-do=download]");
    this.rank?.addEventListener("change", () => this.open());
    this.earlier.addEventListener("click", () => this.before());
    this.search.addEventListener("submit", (event) => { event.preventDefault(); this.look(); });
    this.box.addEventListener("scroll", () => { if (!this.atEnd()) this.follow.checked = false; });
    this.follow.addEventListener("change", () => { if (this.follow.checked) this.toEnd(); });
  }

  get path() { return `/api/runs/${encodeURIComponent(this.id)}/logs/${this.rank.value}`; }
  get topic() { return `log:${this.id}:${this.rank.value}`; }

  atEnd() { return this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40; }
  toEnd() { this.box.scrollTop = this.box.scrollHeight; }

  async open(offset = -CHUNK) {
    if (this.heard) unsubscribe(this.heard);
    this.box.replaceChildren();
    this.isEmpty(false);
    this.box.dataset.ready = "";
    this.early = [];
    this.heard = this.topic;
    this.download.href = `${this.path}/text`;
    // Another rank may be chosen while this one's end is on its way.
    const turn = this.turn = (this.turn ?? 0) + 1;
    const part = await this.part(offset);
    if (!part || turn !== this.turn) return;
    [this.first, this.next] = [part.offset, part.next];
    this.append(part.text);
    this.unfinished(part.rest);
    this.earlier.hidden = this.first === 0;
    this.isEmpty(!this.box.childElementCount);
    this.box.dataset.ready = "yes";
    subscribe(`${this.topic}@${this.next}`, (data) => this.take(data));
  }

  async part(offset) {
    try {
      const part = await call("GET", `${this.path}?offset=${offset}&limit=${CHUNK}`);
      this.note.textContent = "";
      return part;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.note.textContent = error.status === 404 ? "This rank has written no log yet." : error.message;
      if (error.status === 404) [this.first, this.next] = [0, 0];
      return null;
    }
  }

  // What the stream brings may overlap what is here (two tabs), or leave a hole (a stream that was dropped).
  async take({ rank, offset, next, text, again }) {
    // The file was replaced by another.
    if (again) { this.open(); return; }
    if (String(rank) !== this.rank.value || next <= this.next || this.filling) return;
    if (offset === this.next) {
      this.next = next;
      this.append(text);
      return;
    }
    this.filling = true;
    const turn = this.turn;
    try {
      for (let part = await this.part(this.next); part && turn === this.turn && part.next > this.next; part = await this.part(this.next)) {
        this.next = part.next;
        this.append(part.text);
      }
    } finally { this.filling = false; }
  }

  // A box without a line looks like a page that does not work.
  isEmpty(is) { this.box.dataset.note = is ? "Nothing has been printed so far." : ""; }

  // The last line of a program that has not ended it yet; it comes again when it is whole.
  unfinished(rest) {
    if (!rest) return;
    this.loose = element("div", { text: logLine(rest), class: "faint" });
    this.box.append(this.loose);
    if (this.follow.checked) this.toEnd();
  }

  // A part has whole lines.
  append(text) {
    if (!text) return;
    this.loose?.remove();
    this.isEmpty(false);
    const lines = text.split("\n");
    if (lines.at(-1) === "") lines.pop();
    this.box.append(...lines.map((line) => element("div", { text: logLine(line) })));
    const most = this.follow.checked ? MOST_LINES : 4 * MOST_LINES;
    while (this.box.childElementCount > most) {
      this.box.firstElementChild.remove();
      this.earlier.hidden = true;
    }
    if (this.follow.checked) this.toEnd();
  }

  async before() {
    const from = Math.max(0, this.first - CHUNK);
    const turn = this.turn;
    const part = await call("GET", `${this.path}?offset=${from}&limit=${this.first - from}`);
    if (turn !== this.turn) return;
    // A line that is longer than a part: there is no place to begin.
    if (part.offset >= this.first) { this.earlier.hidden = true; return; }
    const lines = part.text.split("\n");
    if (lines.at(-1) === "") lines.pop();
    const height = this.box.scrollHeight;
    this.follow.checked = false;
    this.box.prepend(...lines.map((line) => element("div", { text: logLine(line) })));
    this.box.scrollTop += this.box.scrollHeight - height;
    this.first = part.offset;
    this.earlier.hidden = this.first === 0;
  }

  async look() {
    const word = new FormData(this.search).get("word").trim();
    this.found.replaceChildren();
    this.found.hidden = !word;
    if (!word) return;
    try {
      const { matches, more } = await call("GET", `${this.path}?search=${encodeURIComponent(word)}`);
      this.note.textContent = matches.length ? `${matches.length}${more ? " and more" : ""} lines` : `No line has “${word}”.`;
      this.found.hidden = !matches.length;
      this.found.append(...matches.map(({ offset, line }) => {
        const button = element("button", { type: "button", text: logLine(line) });
        button.addEventListener("click", () => this.show(offset));
        return element("li", {}, button);
      }));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      say(error.message, true);
    }
  }

  // Shows the log from a place on, without following it: reading must not jump.
  async show(offset) {
    this.follow.checked = false;
    await this.open(offset);
    this.box.firstElementChild?.classList.add("hit");
    this.box.scrollTop = 0;
  }
}
