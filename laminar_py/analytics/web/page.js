// Draws the page from the data in it; a page without data asks `data.json` beside it, again and again.
"use strict";

function drawPage(page) {
  window.laminar = { page, timeline, drawn: true };
  document.title = `${page.name} – laminar`;
  byId("name").textContent = page.name;
  drawHeadline(page);
  drawWall(page);
  timeline.show(page.timeline);
  drawDistributions(page);
  drawStaleness(page);
  drawStep(page);
  drawCurves(page);
  drawRelays(page);
  drawDrops(page);
}

function say(text) {
  byId("state").textContent = text;
}

async function follow() {
  const token = new URLSearchParams(location.search).get("token");
  const address = token === null ? "data.json" : `data.json?token=${encodeURIComponent(token)}`;
  let tag = null, wait_s = 2;
  for (;;) {
    try {
      const answer = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      wait_s = Number(answer.headers.get("X-Refresh-Seconds")) || wait_s;
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        const page = await answer.json();
        drawPage(page);
        const when = new Date().toLocaleTimeString();
        say(page.live ? `goes on; drawn at ${when}, again every ${number(wait_s, 2)} s` : `has ended; drawn at ${when}`);
      } else if (answer.status !== 304) {
        say((await answer.text()) || `the dashboard answers ${answer.status}`);
      }
    } catch (error) {
      say(`no answer from the dashboard; trying again (${error.message})`);
    }
    await new Promise((done) => setTimeout(done, wait_s * 1000));
  }
}

const data = JSON.parse(byId("data").textContent);
if (data) {
  drawPage(data);
  say(data.live ? "went on when this was drawn" : "has ended");
} else {
  say("reading the record");
  follow();
}
scheme.addEventListener("change", () => window.laminar && drawPage(window.laminar.page));
