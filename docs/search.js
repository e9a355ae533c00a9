// The names of flags begin with dashes, and a dash in front of a word excludes it from a search. So queries go to the
// search worker without these dashes: a reader who types `--adopt` looks for the flag.
const QUERY = 2;
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const isQuery = message && message.type === QUERY && typeof message.data === "string";
  const sent = isQuery ? { ...message, data: message.data.replace(/(^|\s)-+(?=\w)/g, "$1") } : message;
  return post.call(this, sent, ...rest);
};
