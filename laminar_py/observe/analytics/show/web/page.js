// Draws the page from the data in it; a page without data asks `data.json` beside it, again and again.
"use strict";

const QUIET_S = 120; // without any event, after which a run may have been killed

function drawPage(page) {
  window.laminar = { page, timeline, texts, drawn: true };
  document.title = `${page.name} – laminar`;
  byId("name").textContent = page.name;
  drawHeadline(page);
  drawWall(page);
  timeline.show(page.timeline);
  drawDistributions(page);
  drawStaleness(page);
  drawStep(page);
  drawCurves(page);
  drawLearner(page);
  texts.show(page.texts);
  drawRelays(page);
  drawDrops(page);
  drawConfig(page);
}

function say(text) {
  byId("state").textContent = text;
}

// What is known of the run's end: a run that was killed never says that it has ended.
function fate(page) {
  if (!page.live) return "has ended";
  const quiet_s = Date.now() / 1000 - page.heard_s, heard = new Date(page.heard_s * 1000).toLocaleString();
  return quiet_s < QUIET_S ? "goes on" : `has not ended, but its last event was at ${heard}: killed, or slow`;
}

// What to ask the server, with the token that the page itself was asked with.
function address(name, query = {}) {
  const token = new URLSearchParams(location.search).get("token");
  const asked = new URLSearchParams({ ...query, ...(token === null ? {} : { token }) }).toString();
  return asked ? `${name}?${asked}` : name;
}

async function follow() {
  let tag = null, wait_s = 2, drawn = null;
  for (;;) {
    try {
      const answer = await fetch(address("data.json"), { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      wait_s = Number(answer.headers.get("X-Refresh-Seconds")) || wait_s;
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        const page = await answer.json();
        drawPage(page);
        drawn = { page, when: new Date().toLocaleTimeString() };
      } else if (answer.status !== 304) {
        throw new Error((await answer.text()) || `it answers ${answer.status}`);
      }
      const again = drawn.page.live ? `, looks again every ${number(wait_s, 2)} s` : "";
      say(`${fate(drawn.page)}; drawn at ${drawn.when}${again}`);
    } catch (error) {
      say(`${drawn ? "not up to date" : "waiting"}: ${error.message}`);
    }
    await new Promise((done) => setTimeout(done, wait_s * 1000));
  }
}

const data = JSON.parse(byId("data").textContent);
if (data) {
  drawPage(data);
  say(data.live ? `had not ended when this was drawn; last event at ${new Date(data.heard_s * 1000).toLocaleString()}` : "has ended");
} else {
  say("reading the record");
  follow();
}
scheme.addEventListener("change", () => window.laminar && drawPage(window.laminar.page));
