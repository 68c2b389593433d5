// Render formulas; again after each page that the site loads without a reload.
document$.subscribe(({ body }) => {
  renderMathInElement(body, {
    delimiters: [
      { left: "\\[", right: "\\]", display: true },
      { left: "\\(", right: "\\)", display: false },
    ],
  });
  // No line breaks between a formula and the comma after it: the comma moves into the formula.
  for (const formula of body.querySelectorAll("span.arithmatex")) {
    const [after, end] = [formula.nextSibling, formula.querySelector(".katex-html > :last-child")];
    const mark = after instanceof Text && after.data.match(/^[.,;:!?)]+/);
    if (mark && end) {
      end.append(mark[0]);
      after.data = after.data.slice(mark[0].length);
    }
  }
});
