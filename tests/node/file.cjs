// Node 18, which Debian 12 has, keeps `File` in a module; OpenAI's package needs it as a global for uploads.
globalThis.File ??= require("node:buffer").File;
