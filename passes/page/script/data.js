// The data of the page, and the statements of each stage, unpacked when they are first asked for.

const DATA = JSON.parse(document.getElementById("data").textContent);
const REPORT = DATA.report;
const STAGES = DATA.graph.stages;
const LAST = STAGES.length - 1;
const TIMELINE = DATA.timelines.measured || DATA.timelines.estimated || null;
const COLLECTIVES = new Map(REPORT.every.map((one) => [one.node, one]));

const unpacked = [];

/** Statement number `n`: its name, type and code, and where in the step it belongs. */
function statement(n) {
  if (unpacked[n]) return unpacked[n];
  const [code, comment, phase, module, line, placement, role] = DATA.graph.statements[n];
  const texts = DATA.graph.texts;
  const made = {
    n, code, comment: texts[comment], phase: texts[phase], module: texts[module], line: texts[line],
    placement: texts[placement], role: texts[role], type: "", expression: "",
  };
  const typed = /^(\w+)(?:: "([^"]*)")?(?: = (.*))?/.exec(code);
  made.name = typed ? typed[1] : code;
  made.type = typed && typed[2] || "";
  made.expression = typed && typed[3] || "";
  if (made.role === "output") made.name = code.replace(/,$/, "");
  if (made.role) made.phase = made.role === "input" ? "inputs" : "outputs";
  unpacked[n] = made;
  return made;
}

/** What a search looks through. */
function searched(each) {
  each.lower ||= `${each.code} ${each.comment} ${each.module} ${each.line}`.toLowerCase();
  return each.lower;
}

const numbers = [];

/** The numbers of the statements of a stage, in order. */
function numbersOf(stage) {
  if (!numbers[stage]) {
    numbers[stage] = [];
    for (const [first, count] of STAGES[stage].runs) for (let k = 0; k < count; k++) numbers[stage].push(first + k);
  }
  return numbers[stage];
}

const byName = [];

/** The computed values and inputs of a stage by name. */
function valuesOf(stage) {
  if (!byName[stage]) {
    byName[stage] = new Map();
    for (const n of numbersOf(stage)) {
      const each = statement(n);
      if (each.role !== "output") byName[stage].set(each.name, each);
    }
  }
  return byName[stage];
}

/** The names of the values that a statement reads. */
function readsOf(each, stage) {
  const code = (each.role === "output" ? each.code : each.expression).replace(/'(?:[^'\\]|\\.)*'/g, "");
  const names = code.match(/(?<![\w.])[A-Za-z_]\w*(?!\w|\s*=[^=])/g) || [];
  const known = valuesOf(stage);
  return [...new Set(names)].filter((name) => known.has(name) && (name !== each.name || each.role === "output"));
}

/** From the name of a value to the first and the last stage that have it, once that is known. */
const life = new Map();

/** Unpack all statements while the browser is idle, so that no stage and no search waits for it. */
function warmUp() {
  const steps = warmUpSteps();
  const go = (deadline) => {
    while (deadline.timeRemaining() > 2) if (steps.next().done) return;
    requestIdleCallback(go);
  };
  requestIdleCallback(go);
}

function* warmUpSteps() {
  for (let n = 0; n < DATA.graph.statements.length; n++) {
    searched(statement(n));
    if (n % 50 === 0) yield;
  }
  const found = new Map();
  for (let stage = 0; stage <= LAST; stage++) {
    for (const [k, n] of numbersOf(stage).entries()) {
      const each = statement(n), before = found.get(each.name);
      if (each.role !== "output") found.set(each.name, [before ? before[0] : stage, stage]);
      if (k % 500 === 0) yield;
    }
  }
  for (const [name, stages] of found) life.set(name, stages);
  for (let stage = LAST; stage >= 0; stage--) {
    valuesOf(stage);
    yield;
  }
  yield* userSteps(LAST);
}

const users = [];

/** The statements that read a value. */
function usersOf(name, stage) {
  if (!users[stage]) for (const _ of userSteps(stage));
  return users[stage].get(name) || [];
}

function* userSteps(stage) {
  const found = new Map();
  for (const [k, n] of numbersOf(stage).entries()) {
    for (const read of readsOf(statement(n), stage)) {
      if (!found.has(read)) found.set(read, []);
      found.get(read).push(statement(n));
    }
    if (k % 50 === 0) yield;
  }
  users[stage] = found;
}

/** The statement of the final program with this name, or nothing. */
function finalValue(name) {
  return LAST >= 0 ? valuesOf(LAST).get(name) : undefined;
}
