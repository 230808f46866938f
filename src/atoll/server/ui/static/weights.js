// The weights that a training publishes or follows: newest version, followers and their lag.

import { get, query } from "./api.js";
import { bytes, duration, h, put, replaceIfChanged } from "./dom.js";

const COLUMNS = ["Follower", "Rank", "Version", "Behind", "Lag", "Reported"];
const MAX_FOLLOWERS = 100; // rows of one channel
const RECENT = 6; // versions

const versions = (count) => `${count} version${count === 1 ? "" : "s"}`;
const age = (seconds) => `${duration(seconds)} ago`;

export class Weights {
  constructor(panel, path, name, signal) {
    Object.assign(this, { panel: panel.panel, body: panel.body, path, name, signal, items: [] });
    this.panel.hidden = true;
  }

  count() {
    return this.items.length;
  }

  async update(page) {
    this.uid = page.row.uid;
    await this.load();
  }

  async load() {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      const path = `/v1/trainings/${this.path}/weights${query({ uid: this.uid })}`;
      this.items = (await get(path, this.signal)).items;
      this.panel.hidden = !this.items.length;
      // Ages change all the time: what has focus in the panel must survive that.
      if (!this.body.contains(document.activeElement)) this.draw();
    } catch (error) {
      if (error.name !== "AbortError") put(this.body, h("p", { class: "trouble" }, error.message));
    } finally {
      this.isLoading = false;
    }
  }

  draw() {
    replaceIfChanged(this.body, this.items, () => this.items.map((each) => this.channel(each)));
  }

  channel(channel) {
    const [newest] = channel.versions;
    return [
      h("h3", { class: "mono" }, channel.uri),
      h("p", {}, newest ? this.headline(newest) : "No version yet."),
      h("p", { class: "small dim" }, this.recent(channel.versions)),
      channel.followers.length ? this.followers(channel, newest) : null,
    ];
  }

  headline(newest) {
    const step = newest.step === null ? "" : `, step ${newest.step}`;
    const who = newest.rank === null ? null : this.rank(newest);
    return [
      h("b", {}, `Version ${newest.number}`),
      `${step}: ${bytes(newest.bytes)}, published ${age(newest.ageS)}`,
      who ? [" by ", who] : null,
      ".",
    ];
  }

  recent([, ...older]) {
    const texts = older
      .slice(0, RECENT)
      .map((each) => `${each.number} (${bytes(each.bytes)}, ${age(each.ageS)})`);
    return texts.length ? `Before it: ${texts.join(", ")}.` : "";
  }

  followers({ uri, followers }, newest) {
    const fresh = followers.filter((each) => each.isFresh);
    const current = fresh.filter((each) => newest && each.number === newest.number).length;
    const behind = Math.max(0, ...fresh.map((each) => (each.lagS === null ? 0 : each.behind)));
    const lag = Math.max(0, ...fresh.map((each) => each.lagS || 0));
    const slowest = behind ? `; the slowest lacks ${versions(behind)}, for ${duration(lag)}` : "";
    const more = followers.length - MAX_FOLLOWERS;
    const serving = fresh.length
      ? `${current} of ${fresh.length} followers serve it${slowest}.`
      : "No follower reports now.";
    return [
      h("p", {}, serving),
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": `Followers of ${uri}` },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              COLUMNS.map((each) => h("th", { scope: "col" }, each)),
            ),
          ),
          h(
            "tbody",
            {},
            followers.slice(0, MAX_FOLLOWERS).map((each) => this.row(each)),
          ),
        ),
      ),
      more > 0 ? h("p", { class: "small dim" }, `${more} more followers are not listed.`) : null,
    ];
  }

  row(each) {
    return h(
      "tr",
      { class: each.isFresh ? "" : "dim" },
      h("td", { class: "mono" }, each.name),
      h("td", {}, this.rank(each)),
      h("td", {}, each.number || "joining"),
      h("td", {}, each.number ? each.behind : "–"),
      h("td", {}, each.lagS === null ? "–" : each.behind ? duration(each.lagS) : "0 s"),
      h("td", {}, age(each.ageS), each.isFresh ? null : " (ended)"),
    );
  }

  rank({ training, rank }) {
    if (training === this.name) return `rank ${rank}`;
    const link = h(
      "a",
      { href: `/t/${encodeURIComponent(training)}`, "data-link": true },
      training,
    );
    return [link, `, rank ${rank}`];
  }
}
