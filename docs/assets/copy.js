// The copy button of a Python session copies what can be run: no prompts, no outputs.
function codeOf(session) {
  const copy = session.cloneNode(true);
  copy.querySelectorAll(".gp").forEach((prompt) => (prompt.textContent = "\0"));
  const lines = copy.textContent.split("\n").filter((line) => line === "" || line[0] === "\0");
  return lines.join("\n").replaceAll("\0", "").replace(/\n{3,}/g, "\n\n").trim() + "\n";
}

// Before the button's own listener, which prefers this attribute to its target.
document.addEventListener(
  "click",
  ({ target }) => {
    const button = target.closest("[data-clipboard-target]");
    const session = button && document.querySelector(button.dataset.clipboardTarget);
    if (session?.querySelector(".gp")) button.dataset.clipboardText = codeOf(session);
  },
  { capture: true },
);
