// What the server does now.
export function showLive(main) {
  main.replaceChildren();
}
