// Runs the checks of one client and reports each as a line of JSON. It runs with the client's packages, without Onward.
import { appendFileSync } from "node:fs";
import { parseArgs } from "node:util";

const options = Object.fromEntries(["url", "model", "results", "folder"].map((name) => [name, { type: "string" }]));
const { values } = parseArgs({ options });

export const { url, model, folder } = values;
export const baseURL = `${url}/v1`;
export const CAPITAL = "What is the capital of France? Answer in one sentence.";
export const ABSENT_MODEL = "no-such-model";

function report(name, outcome, more = {}) {
  appendFileSync(values.results, JSON.stringify({ name, outcome, ...more }) + "\n");
}

export async function check(name, run) {
  try {
    await run();
    report(name, "passed");
  } catch (fault) {
    console.error(fault);
    report(name, "failed", { detail: String(fault).slice(0, 500) });
  }
}

export function clientLacks(...names) {
  for (const name of names) report(name, "not_applicable", { reason: "the client has no such function" });
}
