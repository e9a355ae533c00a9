// Reads one stream with the TypeScript client and prints what it got as JSON: node read_stream.mjs CLIENT URL PATH BODY OPTIONS
const [client, url, path, body, options] = process.argv.slice(2);
const { stream, StreamFailed } = await import(client);
const result = { events: [], resumes: [] };
const { breakAfter, ...given } = JSON.parse(options);
try {
  const onResume = (pauseMs, attempt) => result.resumes.push([pauseMs, attempt]);
  for await (const event of stream(url, path, JSON.parse(body), { ...given, onResume })) {
    result.events.push(event);
    if (result.events.length === breakAfter) break;
  }
} catch (error) {
  if (!(error instanceof StreamFailed)) throw error;
  const { message, status, code, partial, lastEventId } = error;
  result.failed = { message, status, code, partial, lastEventId };
}
process.stdout.write(JSON.stringify(result));
