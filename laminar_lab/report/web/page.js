// The page of a run, from the data in it; a page without data requests `data.json` again and again.

const LOOK_S = 2; // between two requests
const QUIET_S = 120; // without any event, after which a run may have been killed

function drawPage(page) {
  window.laminar = { page };
  document.title = `${page.name} – laminar`;
  byId("name").textContent = page.name;
  drawCards(page.cards);
  for (const panel of page.panels) drawPanel(panel, byId("panels"));
}

function say(text) {
  byId("state").textContent = text;
}

// Words on the end of a run: a killed run never records its end.
function endOf(page) {
  if (!page.live) return "has ended";
  const quiet_s = Date.now() / 1000 - page.heard_s, heard = new Date(page.heard_s * 1000).toLocaleString();
  return quiet_s < QUIET_S ? "is running" : `has not ended, but its last event was at ${heard}: killed, or slow`;
}

async function follow() {
  let tag = null, drawn = null;
  for (;;) {
    try {
      const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        const page = await answer.json();
        drawPage(page);
        drawn = { page, when: new Date().toLocaleTimeString() };
      } else if (answer.status !== 304) {
        throw new Error((await answer.text()) || `it answers ${answer.status}`);
      }
      say(`${endOf(drawn.page)}; drawn at ${drawn.when}`);
    } catch (error) {
      say(`${drawn ? "not up to date" : "waiting"}: ${error.message}`);
    }
    await new Promise((done) => setTimeout(done, LOOK_S * 1000));
  }
}

document.addEventListener("DOMContentLoaded", () => {
  if (data) drawPage(data);
  say(!data ? "reading the record" : data.note ? data.note : data.live ? `had not ended when this was drawn; last event at ${new Date(data.heard_s * 1000).toLocaleString()}` : "has ended");
  if (!data) follow();
  scheme.addEventListener("change", () => window.laminar && drawPage(window.laminar.page));
});
