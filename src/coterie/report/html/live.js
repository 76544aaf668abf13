// Fetches the run every second and shows it. It sends nothing and changes nothing.
const place = document.getElementById("run");
const contact = document.getElementById("contact");
let mark = null;

async function update() {
  let pause = 1000;
  try {
    const answer = await fetch("/run", { headers: mark ? { "If-None-Match": mark } : {}, cache: "no-store" });
    if (answer.status === 200) {
      const open = [...place.querySelectorAll("details[open] > summary")].map((one) => one.textContent);
      mark = answer.headers.get("ETag");
      place.innerHTML = await answer.text();
      for (const one of place.querySelectorAll("details > summary")) {
        if (open.includes(one.textContent)) one.parentElement.open = true;
      }
      const title = place.querySelector("[data-title]");
      if (title) document.title = title.dataset.title;
      if (place.querySelector("[data-over]")) pause = 10000;
    }
    contact.textContent = "This page updates itself and can only be read.";
  } catch {
    contact.textContent = "The server does not answer: coterie watch was ended. What you see is the last state.";
    pause = 3000;
  }
  setTimeout(update, pause);
}

update();
