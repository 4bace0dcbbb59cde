-- Written by kimi-rig: which engine gets a request. HAProxy runs it.
-- An engine is chosen once its unit has accepted it, and only while the socket at its port is the service user's:
-- another local user who listens there in its place gets neither a request nor the engine's key.
local USER = "kimi"
local ENGINES = {
  ["edge.1"] = {
    { port = 18000, started = "/run/kimi-rig/vllm-base/started.json", model = "/shared/kimi-k2.5-int4" },
    { port = 18000, started = "/run/kimi-rig/vllm-eagle3-aq-medai/started.json", model = "/shared/kimi-k2.5-int4" },
    { port = 18000, started = "/run/kimi-rig/vllm-base-current/started.json", model = "/shared/kimi-k2.5-int4" },
    { port = 18000, started = "/run/kimi-rig/vllm-eagle3-aq-medai-current/started.json", model = "/shared/kimi-k2.5-int4" },
  },
  ["edge.2"] = {
    { port = 18000, started = "/run/kimi-rig/vllm-eagle3-custom/started.json", model = "/shared/kimi-k2.5-int4" },
    { port = 18000, started = "/run/kimi-rig/vllm-eagle3-custom-current/started.json", model = "/shared/kimi-k2.5-int4" },
  },
  ["edge.3"] = {
    { port = 18000, started = "/run/kimi-rig/sglang-base/started.json", model = "/shared/kimi-k2.5-int4" },
    { port = 18000, started = "/run/kimi-rig/sglang-eagle3-aq-medai/started.json", model = "/shared/kimi-k2.5-int4" },
    { port = 18000, started = "/run/kimi-rig/sglang-eagle3-custom/started.json", model = "/shared/kimi-k2.5-int4" },
    { port = 18000, started = "/run/kimi-rig/sglang-base-current/started.json", model = "/shared/kimi-k2.5-int4" },
    { port = 18000, started = "/run/kimi-rig/sglang-eagle3-aq-medai-current/started.json", model = "/shared/kimi-k2.5-int4" },
    { port = 18000, started = "/run/kimi-rig/sglang-eagle3-custom-current/started.json", model = "/shared/kimi-k2.5-int4" },
  },
}
local BY_MODEL = false
local NOT_PERMITTED, LISTENS, LINE = 13, "0A", 150

local uid
for line in io.lines("/etc/passwd") do
  local name, id = line:match("^([^:]*):[^:]*:(%d+):")
  if name == USER then uid = id end
end

local function exists(path)
  local file, _, code = io.open(path)
  if file then file:close() end
  return file ~= nil or code == NOT_PERMITTED
end

-- Whether it is the service user who listens at a port of 127.0.0.1; then nobody else can. Read line by line, which is
-- what the kernel then makes: behind the listening sockets, which come first, it looks through a large table.
local function owned(port)
  local file = io.open("/proc/net/tcp")
  if not file then return false end
  file:setvbuf("no")
  file:read(LINE)
  local wanted, line, place, state, owner = string.format("0100007F:%04X", port)
  repeat
    line = file:read(LINE) or ""
    place, state, owner = line:match("^%s*%d+: (%x+:%x+) %x+:%x+ (%x+) %x+:%x+ %x+:%x+ %x+%s+(%d+)")
  until place == wanted or state ~= LISTENS
  file:close()
  return place == wanted and state == LISTENS and owner == uid
end

local turn = 0
core.register_fetches("engine", function(txn, group)
  local found = {}
  for _, one in ipairs(ENGINES[group]) do
    if exists(one.started) and owned(one.port) then found[#found + 1] = one end
  end
  if BY_MODEL and #found > 1 then
    local body = txn.f:req_body() or ""
    local model, of_model = body:match('"model"%s*:%s*"([^"]*)"'), {}
    for _, one in ipairs(found) do
      if one.model == model then of_model[#of_model + 1] = one end
    end
    if #of_model > 0 then found = of_model end
  end
  if #found == 0 then return 0 end
  turn = turn % #found + 1
  return found[turn].port
end)
