#!/usr/bin/env python3
# SPDX-License-Identifier: MPL-2.0 (https://mozilla.org/MPL/2.0/)
"""stadi: a GPU slot broker. One card, several engines that cannot share it, one file that owns the card.

A language model and an image model each believe that the card is theirs; whichever loads second runs out of
memory. stadi stands in front of both. The way of a request:
    1. a Front accepts the connection; the Wire's strict reader takes the head (or answers 400);
    2. the Routes decide from method, path and query alone: take (needs the card), pass (touches no GPU),
       watch (only while that engine is loaded), own (stadi answers itself);
    3. who takes the card has its body read first, then waits in the Card's queue;
    4. the Card lets the holds in flight end, evicts the resident engines, waits until the VRAM has returned,
       makes the wanted engine ready (a hand-over, done by one thread, outside the lock), and grants;
    5. the Relay passes the bytes on, both ways, as they come;
    6. the hold ends with the answer, or, where a job goes on after its answer, with the job (a follower).
The one promise: at any moment the holds belong to one engine. Everything else may fail; this may not.
The rooms, in reading order; each uses only those above it:
    Settings    one table; flags, environment, -h and the README come from it
    VRAM        who reads the card, and when it counts as given back
    Card        the lock, the queue, the hand-over, the ledger; knows no HTTP and no engine by name
    Child       the sd-server process: started, watched, ended with its whole group
    Engines     one class each: resident, busy, evict, ready, and the jobs that go on after an answer
    Routes      tables, and the one function that classifies
    Wire        heads and bodies of HTTP/1.1, read strictly
    Relay       one exchange from client to engine and back
    Eyes        status, health, metrics, log
    Page        what a browser shows of the status
    Front       servers and the handler: from a route's class to card, relay or answer
    Commands    status, free, load, release and run: they ask a running stadi
    main        settings, signals, wiring
"""
import bisect, collections, contextlib, errno, functools, glob, http.client, http.server, io, ipaddress
import itertools, json, logging, os, re, resource, select, shlex, shutil, signal, socket, struct, subprocess
import sys, tempfile, threading, time, types, urllib.parse

VERSION = "0.1.0"
MIB, GIB, LLM, IMAGE = 1 << 20, 1 << 30, "llm", "image"
log = logging.getLogger("stadi")

def start(target, *args):
    """A daemon thread that runs; None when the system has none left."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
        return thread

def proc(path):
    """The bytes of a file of /proc; none when it is gone, or may not be read."""
    with contextlib.suppress(OSError), open(f"/proc/{path}", "rb") as file:
        return file.read()
    return b""

def ready(seconds, *wanted):
    """{file descriptor: events} of the (socket, events) ready within that time; 0 and less only looks."""
    poller = select.poll()
    for sock, events in wanted:
        poller.register(sock, events)
    return dict(poller.poll(min(max(0.0, seconds), 1e6) * 1000))        # the kernel's most: 24 days

def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
def name_of(pid):
    return re.sub(r"[^ -~]", "?", proc(f"{pid}/comm").decode("latin-1").strip())

# ----- Settings ---------------------------------------------------------------------------------------------
class Usage(Exception):
    """A setting that cannot be used; the text is one line that says what to write instead."""

class Endpoint(collections.namedtuple("Endpoint", "host port")):
    """Where an engine listens, or where stadi does; no host is every address."""
    def __str__(self):
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self):
        return bool(re.fullmatch(r"|localhost|127\.[\d.]+|::1", self.host))

def is_ip(text):
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))

def matching(pattern, message, convert=str):
    """A reader of texts that match; message says what to write instead."""
    def read(text):
        with contextlib.suppress(ValueError):
            if re.fullmatch(pattern, text, re.ASCII):
                return convert(text)
        raise ValueError(message)
    return read

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
def seconds(text):
    return min(1e9, sum(float(number) * UNITS[unit] for number, unit in re.findall(DURATION, text)))

duration = matching(f"0|(?:{DURATION})+", "is no duration; write 5s, 5m, 1h30m, 500ms or 0", seconds)   # Go's
gibibytes = matching(r"\d+(\.\d+)?", "is no size; write GiB: 2, 0.5", lambda text: int(float(text) * GIB))
secret = functools.partial(re.sub, r"[^!-~]", "")       # a stray CR would end up in an error that quotes it
def one_of(*choices):
    return matching(f"(?i:{'|'.join(choices)})", f"is none of {', '.join(choices)}", str.lower)

def endpoint_in(text):
    """The Endpoint of http://host:port or host:port; None for off."""
    if text != "off":
        parts = urllib.parse.urlsplit(text if "//" in text else f"//{text}")
        return Endpoint(parts.hostname or "", 80 if parts.port is None else parts.port)

listen_address = matching(r"off|(?:\[[0-9A-Fa-f:.]+\]|[0-9.]*|localhost):\d+",
                          "is no address; write 127.0.0.1:55558, :55558, [::1]:55558 or off", endpoint_in)
engine_url = matching(r"off|http://(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d+)?/?",
                      "is no engine's address; write http://127.0.0.1:55555 or off", endpoint_in)

def command_line(text):
    """Words of a command line: split at spaces, or as a shell does where it has quotes or backslashes."""
    return shlex.split(text) if set(text) & set("'\"\\") else text.split()

def items(text):
    return tuple(text.replace(",", " ").split())
def names(text):
    return items(text.lower())

paths = matching(r"((/[A-Za-z0-9_.-]+)+(, *|$))*", "is no list of paths; write /sam/detect,/sam/x", items)

class Setting(collections.namedtuple("Setting", "flag default read help variable")):
    """read: text -> value, or ValueError, which says what to write; variable: "" where there is none."""
    def __str__(self):
        return f"-{self.flag}" + (f" ({self.variable})" if self.variable else "")

SETTINGS = {flag: Setting(flag, default, read, text, *variable or ["STADI_" + flag.upper().replace("-", "_")])
            for flag, default, read, text, *variable in (       # variable: where it is not STADI_FLAG
    ("listen", "127.0.0.1:55558", listen_address, "where clients of the router and sd-server go; :port, off"),
    ("llm", "http://127.0.0.1:55555", engine_url, "llama.cpp's router (llama-server without a model); off"),
    ("llm-key", "", secret, "the router's --api-key, for stadi's own calls; never shown or logged"),
    ("sd", "http://127.0.0.1:55557", engine_url, "where sd-server, stadi's child, comes up; off"),
    ("idle", "5m", duration, "stop sd-server this long after the last image request ended; 0 never"),
    ("busy-wait", "2m", duration, "how long a chat waits for a render, then 503; 0 without end"),
    ("image-wait", "10m", duration, "how long an image waits for chats (renders don't count); 0 no end"),
    ("render-wait", "1h", duration, "bound on one render; then sd-server is stopped and it gets 504; 0 none"),
    ("vram-wait", "45s", duration, "bound on the VRAM's return and on the router's unloading; then on"),
    ("load-wait", "15m", duration, "bound on sd-server's port appearing"),
    ("free-gib", "2", gibibytes, "the card counts as free below this many GiB used", ""),
    ("gpu", "", str, "an index, a PCI address, comfy (ask ComfyUI), none; else the card with most VRAM"),
    ("vram-cmd", "", command_line, "a command that prints the MiB used, if amdgpu and nvidia-smi can't tell"),
    ("sd-bin", "sd-server", str, "the sd-server program; a bare name is looked up on PATH"),
    ("sd-args", "", command_line, "sd-server's whole command line in one string; required while sd is on"),
    ("sd-log-dir", "", str, "folder of sd-server.log; else $XDG_CACHE_HOME/stadi or ~/.cache/stadi"),
    ("allow-host", "", names, "more names that clients may call stadi by, comma-separated"),
    ("allow-origin", "", names, "web origins whose pages may use stadi, comma-separated"),
    ("stall", "30s", duration, "a client that neither sends nor takes a byte for so long is cut off"),
    ("grace", "0", duration, "at the end, how long answers in flight may go on; new requests get 503"),
    ("keepalive", "75s", duration, "how long an idle client connection stays open"),
    ("listen-ollama", "off", listen_address, "Ollama's place; :11434 under turnstile", "LISTEN_OLLAMA"),
    ("listen-comfy", "off", listen_address, "ComfyUI's place; :8188 under turnstile", "LISTEN_COMFY"),
    ("ollama", "http://127.0.0.1:11435", engine_url, "where Ollama itself listens; off", "OLLAMA_URL"),
    ("comfy", "http://127.0.0.1:8189", engine_url, "where ComfyUI itself listens; off", "COMFY_URL"),
    ("unload-timeout", "60s", duration, "bound on Ollama's unloading; then it goes on", "UNLOAD_TIMEOUT"),
    ("job-timeout", "15m", duration, "bound on a ComfyUI job, from its acceptance", "JOB_TIMEOUT"),
    ("llm-wait-timeout", "10m", duration, "how long its clients wait, then 503; 0 none", "LLM_WAIT_TIMEOUT"),
    ("warm-model", "", str, "a model that Ollama loads again whenever the card is idle", "WARM_MODEL"),
    ("comfy-keep", "0", duration, "how long ComfyUI keeps its models; 0 frees after every job", "COMFY_KEEP"),
    ("comfy-gate", "", paths, "more POST paths of ComfyUI that need the card, comma-separated", "COMFY_GATE"),
    ("at", "off", engine_url, "the stadi that a command asks; off: the first front that is on"),
    ("wait", "0", duration, "run: how long to wait for the card; 0 without end"),
    ("max", "0", duration, "run: how long the command may have the card, then it is ended; 0 no end"),
    ("log-level", "info", one_of("debug", "info", "warning", "error"), "debug to error", "LOG_LEVEL"),
    ("log-format", "text", one_of("text", "json"), "text or json", "LOG_FORMAT"),
)}
SWITCHES = {"json": "status: as JSON", "watch": "status: again at every change, until Ctrl-C",
            "force": "free: at once, ending what runs",
            "check": "look at the world with these settings, say what to do, and exit, writing nothing",
            "version": "print the version and exit", "h": "print this help and exit"}
COMMANDS = {"turnstile": "stand in front of Ollama and ComfyUI on their usual ports, or ask there",
            "status": "who has the card, who waits, what the last hand-overs took",
            "free": "end what is loaded and give the memory back, before all who wait",
            "load": "make an engine ready: load sd", "release": "take the card from a stuck job: release ID",
            "run": "borrow the card for a command: run -- COMMAND ..."}
TURNSTILE = {"listen": "off", "listen-ollama": ":11434", "listen-comfy": ":8188"}     # that word's defaults

def read_flags(argv):
    """(command, its words, {flag: text, switch or "turnstile": True}). Flags are Go's: -x v, -x=v, --x v,
    --x=v; any word is a value. A command's words: behind -- of run; the engine to load; the id to release."""
    command, rest, given, words = "", [], {}, iter(argv)
    for word in words:
        found = re.fullmatch(r"--?([a-z][a-z-]*)(?:=(.*))?", word, re.DOTALL)
        flag, value = found.groups() if found else (None, None)
        flag = "h" if flag == "help" else flag
        if word == "turnstile":
            given[word] = True
        elif word in COMMANDS and not command:
            command = word
        elif word == "--" and command == "run":
            rest = list(words)
        elif not found and command in ("load", "release") and not rest:
            rest = [word]
        elif flag in SWITCHES and value is None:
            given[flag] = True
        elif flag not in SETTINGS:
            advice = "; put all of -sd-args in quotes" if " " not in given.get("sd-args", " ") else ""
            raise Usage(f"{word!r} is no flag of stadi; -h lists them{advice}")
        else:
            given[flag] = next(words, None) if value is None else value
            if given[flag] is None:
                raise Usage(f"{SETTINGS[flag]} needs a value")
    return command, rest, given

def read_settings(argv, environ):
    """All settings as a namespace: from flags, then environment, then default. Raises Usage."""
    command, rest, given = read_flags(argv)
    defaults = TURNSTILE if "turnstile" in given else {}
    values = types.SimpleNamespace(command=command, rest=rest, **{name: name in given for name in SWITCHES})
    for flag, setting in SETTINGS.items():
        variable = "" if defaults and flag == "listen" else setting.variable
        text = given.get(flag) or environ.get(variable) or defaults.get(flag, setting.default)
        try:
            setattr(values, flag.replace("-", "_"), setting.read(text))
        except ValueError as error:
            raise Usage(f"{setting}: {text!r} {error}") from None
    return values

def runnable(flag, program):
    """The path of a program that a setting names. Raises Usage."""
    if path := shutil.which(program):
        return path
    raise Usage(f"{SETTINGS[flag]}: {program!r} is not there (on PATH), or cannot be executed")

def complete(values, environ):
    """Fill in what depends on other settings, and refuse combinations that cannot work. Raises Usage."""
    values.llm, values.sd = values.listen and values.llm, values.listen and values.sd
    values.ollama, values.comfy = values.listen_ollama and values.ollama, values.listen_comfy and values.comfy
    if not (values.llm or values.sd or values.ollama or values.comfy):
        raise Usage(f"{SETTINGS['listen']}: nothing is on; set -listen, -listen-ollama or -listen-comfy")
    if values.sd and not values.sd_args:
        raise Usage(f"{SETTINGS['sd-args']}: needs '-m FILE --listen-port {values.sd.port}', or -sd off")
    if values.sd and not (values.sd.loopback or is_ip(values.sd.host)):
        raise Usage(f"{SETTINGS['sd']}: sd-server is started here; write http://127.0.0.1:{values.sd.port}")
    used = {}
    for flag in ("listen", "listen-ollama", "listen-comfy", "llm", "sd", "ollama", "comfy"):
        endpoint = getattr(values, flag.replace("-", "_"))
        if endpoint and endpoint.loopback and (other := used.setdefault(endpoint.port, flag)) != flag:
            raise Usage(f"{SETTINGS[flag]}: port {endpoint.port} is that of {SETTINGS[other]}; change one")
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    values.sd_log_dir = os.path.abspath(values.sd_log_dir or os.path.join(cache, "stadi"))

def usage():
    rows = {**COMMANDS, **{f"{setting}   {setting.default}": setting.help for setting in SETTINGS.values()},
            **{f"-{name}": text for name, text in SWITCHES.items()}}
    head = "usage: stadi.py [command] [flags]      flags first, then the environment, then the default\n\n"
    return head + "\n".join(f"  {name}\n        {text}" for name, text in rows.items())

# ----- VRAM -------------------------------------------------------------------------------------------------
STEADY_SECONDS, STEADY_BYTES = 2.0, 64 * MIB    # the driver frees in steps; what lasts this long is the level
FLOOR_BYTES = 256 * MIB                         # what contexts of a desktop vary by
NUDGE_SECONDS, BLIND = 1.5, 5.0                 # no reading for BLIND seconds: the card can't be seen, go on

Reading = collections.namedtuple("Reading", "used total")   # bytes; total: None where the source can't tell
UNREADABLE = (OSError, ValueError, IndexError, OverflowError, subprocess.SubprocessError)

class Meter:
    """Reads the VRAM in use. One that hangs (nvidia-smi, a wedged driver) costs a thread, not the caller."""
    def __init__(self, source, read, every=0.05, users=lambda: ()):
        self.source, self.every, self._users = source, every, users     # every: seconds between two readings
        self.last, self.error = None, ""            # what the last look gave that ended: a Reading, or None
        self._read, self._lock, self._thread = read, threading.Lock(), None

    def read(self, seconds=BLIND):
        """A fresh Reading, or None after at most this many seconds; then .error says why."""
        if self.source == "none":
            return None
        with self._lock:
            if not (self._thread and self._thread.is_alive()):
                self._thread, self._began = start(self._look), time.monotonic()
            thread, left = self._thread, self._began + BLIND - time.monotonic()
        if thread:
            thread.join(max(0.0, min(seconds, left)))       # one that hangs is not waited for again
        if thread and not thread.is_alive():
            return self.last
        self.error = f"{self.source} does not answer"

    def _look(self):
        try:
            reading = self._read()
            if not 0 <= reading.used <= (reading.total or 1024 * GIB):
                raise ValueError(f"{reading.used} bytes in use is nonsense")
            self.last, self.error = reading, ""
        except UNREADABLE as error:
            self.last, before = None, self.error
            self.error = f"{self.source}: {error}"
            if self.error != before:
                log.warning("VRAM cannot be read: %s", self.error)

    def users(self):
        """Who has memory on the card, as far as can be told: [{pid, name, mib}], most first; eight."""
        rows = []
        def look():
            with contextlib.suppress(*UNREADABLE):
                rows.extend((mib, pid) for pid, mib in self._users() if mib)
        if thread := start(look):                       # which may hang as a reading may
            thread.join(BLIND)
        return [{"pid": pid, "name": name_of(pid), "mib": mib} for mib, pid in sorted(rows, reverse=True)[:8]]

def _printed(command):
    """What a command prints, as lines; bounded. Raises ValueError with its own last words when it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BLIND)
    if done.returncode:
        raise ValueError(f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-200:]}")
    return done.stdout.strip().splitlines()

def _vram_cmd(command):
    mebibytes = "".join(_printed(command)[:1])[:80]
    return Reading(int(float(mebibytes) * MIB), None)

def _amdgpu_users(address):
    """From the kernel's fdinfo: a process may have the device open often, and each client counts once."""
    clients = collections.defaultdict(dict)
    for path in glob.glob("[0-9]*/fdinfo/*", root_dir="/proc"):
        pairs = re.findall(r"(?m)^drm-(pdev|client-id|memory-vram):\s*(\S+)", proc(path).decode("latin-1"))
        if (fields := dict(pairs)).get("pdev") == address and "memory-vram" in fields:
            clients[int(path.partition("/")[0])][fields.get("client-id")] = int(fields["memory-vram"]) >> 10
    return [(pid, sum(sizes.values())) for pid, sizes in clients.items()]

def _amdgpu(device, index):
    """(total bytes, index, PCI address, Meter) of a card, by its folder in sysfs. Raises OSError."""
    def read():
        with open(f"{device}/mem_info_vram_used") as used, open(f"{device}/mem_info_vram_total") as total:
            return Reading(int(used.read()), int(total.read()))
    address = os.path.basename(os.path.realpath(device))
    meter = Meter(f"amdgpu, {device}", read, users=functools.partial(_amdgpu_users, address))
    return read().total, str(index), address, meter

def _nvidia_smi(columns, address=""):
    """Rows of words, the first of which is a card's PCI address: of all cards, or of one."""
    lines = _printed(["nvidia-smi", f"--query-{columns}", "--format=csv,noheader,nounits"])
    return [row for line in lines if (row := re.split(" *, *", line))[0] == (address or row[0])]

def _nvidia(address, index, total):
    """The same of a card that nvidia-smi knows, its total in MiB."""
    def read():
        used = _nvidia_smi("gpu=pci.bus_id,memory.used", address)[0][1]
        return Reading(int(used) * MIB, int(total) * MIB)
    def users():
        rows = _nvidia_smi("compute-apps=gpu_bus_id,pid,used_memory", address)
        return [(int(pid), int(mib)) for _, pid, mib in rows if (pid + mib).isdigit()]
    return int(total) * MIB, index, address, Meter(f"nvidia-smi {index}", read, 0.25, users)

def cards(environ):
    """Every card of this machine that can be read, as _amdgpu() tells of it."""
    root, found = environ.get("STADI_DRM_ROOT") or "/sys/class/drm", []
    for number in range(256):                   # there are gaps, and cards of other makers
        with contextlib.suppress(*UNREADABLE):
            found.append(_amdgpu(f"{root}/card{number}/device", len(found)))
    with contextlib.suppress(*UNREADABLE):
        found += [_nvidia(*row) for row in _nvidia_smi("gpu=pci.bus_id,index,memory.total")]
    return found

def find_meter(settings, environ, comfy=None):
    """The Meter of the card that the settings name; source "none" where nothing can be read. Raises Usage.
    comfy: ComfyUI's reading, or None; it counts where the card may be in another machine."""
    if settings.vram_cmd:
        runnable("vram-cmd", settings.vram_cmd[0])
        return Meter("-vram-cmd", functools.partial(_vram_cmd, settings.vram_cmd), 0.25)
    other = Meter("ComfyUI", comfy, 0.25) if comfy and settings.gpu != "none" else Meter("none", None)
    here = settings.sd or any(url and url.loopback for url in (settings.llm, settings.ollama, settings.comfy))
    if settings.gpu == "none" or settings.gpu == "comfy" and comfy:
        return other
    found = cards(environ) if here else []      # the container host's own GPU is not the card
    if settings.gpu:
        there = "; ".join(f"{index} is {meter.source} at {address}" for _, index, address, meter in found)
        wanted = settings.gpu.lower()[-7:]      # a PCI address without its domain, which not all write alike
        found = [card for card in found if wanted in (card[1], card[2].lower()[-7:])]
        if not found:
            raise Usage(f"{SETTINGS['gpu']}: no card {settings.gpu!r}; {there or 'none is here'}; see -h")
    return max(found, key=lambda card: card[0])[-1] if found else other

class Vram:
    """The card's memory: its meter, its floor, and the wait for its return. Used by the mover."""
    def __init__(self, meter, free_below, wait, clock=time.monotonic, sleep=time.sleep):
        self.meter, self.free_below, self.bound = meter, free_below, wait
        self.in_the_way = []    # who had memory when it did not return the last time
        self.floor = None       # bytes: the lowest level after a verified eviction, with nothing resident
        self._clock, self._sleep = clock, sleep
    def used(self):
        return getattr(self.meter.read(min(BLIND, self.bound)), "used", None)

    def wait_back(self, before, verified, nudge, cut):
        """Wait until what was evicted has left the card; "" or a warning that says how much is still used.
        before: bytes used when it began. nudge() is called again and again; cut(): no need of it any more."""
        self.in_the_way = []
        mark = (before or 0) - STEADY_BYTES if self.floor is None else self.floor + FLOOR_BYTES
        was_free = before is not None and before < max(mark, self.free_below)
        began = seen = nudged = level_since = self._clock()
        level = lowest = float("inf")
        while self.meter.source != "none":
            used, now = self.used(), self._clock()
            if now - nudged >= NUDGE_SECONDS:
                nudged = now
                nudge()
            if used is not None:
                seen, lowest = now, min(lowest, used)
                if abs(used - level) > STEADY_BYTES:
                    level, level_since = used, now
                steady = now - level_since >= STEADY_SECONDS
                if was_free or used < self.free_below or steady and used < mark:
                    if verified:
                        self.floor = min(lowest, self.floor or lowest)
                    break
            elif was_free or now - seen >= BLIND:
                return f"VRAM cannot be read ({self.meter.error}): went on without"
            if cut():
                return "the wait for the VRAM was cut short: the next job is the same engine's"
            if now - began >= self.bound:
                if verified and lowest < float("inf"):
                    self.floor = lowest
                self.in_the_way = self.meter.users()
                words = [self.meter.error if used is None else f"{used / GIB:.1f} GiB still used",
                         *("{mib} MiB by {name} (pid {pid})".format(**row) for row in self.in_the_way)]
                return f"VRAM did not return within {self.bound:g}s (-vram-wait): {', '.join(words)}; went on"
            self._sleep(self.meter.every)
        return ""

# ----- Card -------------------------------------------------------------------------------------------------
# One lock guards every field of the Card. Requests wait on it, each on its own turn, and the mover, on _work.
# Whoever changes a field calls _advance(), which grants what can be granted and wakes the mover if a
# hand-over is due. Decisions are made under the lock; engines are called outside of it, by the mover alone.

class Refused(Exception):
    """An answer of stadi's own instead of the engine's. everyone: for all that wait, not one engine's."""
    def __init__(self, status, message, kind="unavailable_error", retry_after=None, everyone=False):
        super().__init__(message)
        self.status, self.kind, self.retry_after, self.everyone = status, kind, retry_after, everyone

class Gone(Exception):
    """The client left; nobody is there to be answered."""

class GivenUp(Exception):
    """A hand-over that nobody wants any more, ended on purpose."""

# freed: something was asked to let go; verified: and seen to; before: bytes used when it began, if earlier
Eviction = collections.namedtuple("Eviction", "freed verified note before", defaults=("", None))
PHASES = "drain", "evict", "vram", "start"          # of a hand-over

class Hold:
    """One right to use the card: waited for, then had, until its end by release() or by revoke()."""
    numbers = itertools.count(1)
    since = began = None        # since when it is had; when it, or the hand-over for it, began
    error = job = None          # its refusal; the asynchronous job that keeps it after the answer
    unwanted, revoked = False, ""   # nobody waits for its work: it may be ended for the next; why it was
    wake = on_revoke = staticmethod(lambda: None)   # it, or what its limit counts, has changed; ends its work

    def __init__(self, engine, what, arrived, limit=0, joins=False, ahead=False, blocked=0.0):
        self.id, self.engine, self.what, self.arrived = next(self.numbers), engine, what, arrived
        self.limit, self.joins, self.ahead, self.blocked = limit, joins, ahead, blocked     # see _left()

class Handover:
    """The card on its way to `to` (an engine, or None: to nobody), from the end of the holds on."""
    phase, started, asked = "drain", False, None    # asked: is busy with work outside of any hold

    def __init__(self, to, why, requester, evict, began):
        self.to, self.why, self.requester, self.evict = to, why, requester, evict
        self.name, self.own = to and to.name, to and not requester      # own: a warm-up, which evicts nobody
        self.cancelled = threading.Event()          # set when nobody wants it any more
        self.began = self.phase_since = began
        self.row = {"from": None, "to": self.name, "why": why, **{f"{phase}_ms": 0 for phase in PHASES},
                    "vram_before": None, "vram_after": None, "notes": []}       # of the ledger

    def note(self, text):
        """Say it, and keep it for the ledger; no warning once nobody wants the hand-over any more."""
        if text:
            self.row["notes"].append(text)
            log.log(logging.INFO if self.cancelled.is_set() else logging.WARNING, "%s", text)

def choose(waiters, now, job_seconds):
    """Who is next of waiters, by arrival: who goes ahead; (a) LLM requests that would pass their limit before
    an image job could end (job_seconds(engine), or None), never past one before them; (b) images; (c) LLM."""
    if ahead := next((waiter for waiter in waiters if waiter.ahead), None):
        return ahead
    image = next((waiter for waiter in waiters if waiter.engine.kind == IMAGE), None)
    if image is None:
        return waiters[0] if waiters else None
    expected = job_seconds(image.engine)
    return next((waiter for waiter in waiters[:waiters.index(image)] if waiter.limit and (
        expected is None or waiter.arrived + waiter.limit < now + 2 * expected)), image)

def median(values):
    return sorted(values)[len(values) // 2] if values else None

class Card:
    """The one GPU, and who may use it. tell(event, **fields) hears of each transition, under the lock."""
    def __init__(self, engines, vram, clock=time.monotonic, tell=lambda event, **fields: None):
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)    # the mover's: a hand-over may be due
        self._engines, self._vram, self._clock, self._tell = tuple(engines), vram, clock, tell
        self._holds, self._waiters = {}, []     # id -> Hold, all of one engine; in order of arrival
        self._owner = self._handover = self.closed = None   # owner: made ready last; None: nobody, or unknown
        self._idle_since, self._blocked_total, self._blocked_since = clock(), 0.0, None     # see _advance()
        self._seconds = collections.defaultdict(lambda: collections.deque(maxlen=50))   # engine -> image jobs
        self._residents, self._ledger = {}, collections.deque(maxlen=50)    # engine's name -> its last answer
        self.warm = self._cold = None           # (engine, work(hold)) for an idle card; due since it is free

    def acquire(self, engine, what, limit, joins=False, on_wait=lambda leave: None, ahead=False):
        """Wait for a hold. limit: seconds (rule 4), 0 for none. joins: may queue inside the engine beside its
        other jobs. on_wait(leave) is told how to leave the queue. Raises Refused, or Gone."""
        with self._lock:
            if self.closed:
                raise self.closed
            waiter = Hold(engine, what, self._clock(), limit, joins, ahead, self._blocked())
            self._waiters.append(waiter)
            self._advance()
            if waiter not in self._waiters:
                return waiter
        on_wait(lambda: self._leave(waiter))            # may call it at once: outside the lock
        with self._lock:
            turn = threading.Condition(self._lock)
            waiter.wake = turn.notify
            while waiter in self._waiters:
                left = self._left(waiter)
                if left is not None and left <= 0:
                    message = f"{what} waited {limit:g}s for the card; {self._reason()}"
                    self._refuse([waiter], Refused(503, message, "busy", self._retry_after(engine)))
                else:
                    turn.wait(left)
        if waiter.error:
            raise waiter.error
        return waiter

    def watch(self, engine, what):
        """A hold for a look at an LLM engine while it has the card or nobody does, else None; never waits."""
        with self._lock:
            others = any(hold.engine is not engine for hold in self._holds.values())
            if self.closed or self._waiters or self._handover or others or self._owner not in (engine, None):
                return None
            hold = self._grant(Hold(engine, what, self._clock()))
            self._advance()
            return hold

    def has(self, engine, at_once=False):
        """Whether engine has the card now, by its holds or as the last that was made ready. at_once: and a
        request for it that came now would have it (almost) at once."""
        with self._lock:
            busy = self._waiters or engine.kind == IMAGE and self._holds
            return self._has(engine) and not (at_once and busy)

    def release(self, hold):
        """End a hold; one that is being revoked ends when its work has been ended."""
        with self._lock:
            if not hold.revoked:
                self._end(hold)

    def revoke(self, hold, why, then=lambda: None):
        """End a hold's work, then() what is left of it; only then the card goes on. False: it was gone."""
        with self._lock:
            if hold.revoked or hold.id not in self._holds:
                return False
            hold.revoked = why
        try:
            hold.on_revoke()
            then()
        finally:                        # no fault of theirs may cost the card
            with self._lock:
                self._end(hold)
        return True

    def reconsider(self, hold):
        """The client of this hold left, and its work goes on: ended for the next, if its engine can."""
        with self._lock:
            hold.unwanted = hold.engine.stoppable
            self._advance()

    def close(self, error, grace=0):
        """Refuse everyone from now on, who waits included; return without holds, or after grace seconds."""
        with self._lock:
            self.closed, until = error, self._clock() + grace
            self._refuse(list(self._waiters), error)
            while self._holds and (left := until - self._clock()) > 0:
                self._work.wait(left)

    def _leave(self, waiter):
        with self._lock:
            if waiter in self._waiters:
                self._refuse([waiter], Gone())

    def _refuse(self, waiters, error):
        """All of them leave the queue before anything is granted anew."""
        for waiter in waiters:
            self._waiters.remove(waiter)
            waiter.error = error
            waiter.wake()
        self._advance()

    def _blocked(self):
        return self._blocked_total + (0 if (at := self._blocked_since) is None else self._clock() - at)

    def _left(self, waiter):
        """Seconds until this waiter's limit; None while no limit counts."""
        moving, now, engine = self._handover, self._clock(), waiter.engine
        image = engine.kind == IMAGE and not engine.lent
        own = moving and moving.to is engine and moving.phase != "drain"
        if own or not waiter.limit or image and self._blocked_since is None:
            return None
        return waiter.limit - (self._blocked() - waiter.blocked if image else now - waiter.arrived)

    def _reason(self):
        """Who has the card, since when, and why, in words."""
        now, moving = self._clock(), self._handover
        for hold in self._holds.values():
            doing = f"job {hold.job}" if hold.job else hold.what
            return f"{hold.engine.name} has had it for {now - hold.since:.0f}s ({doing}){hold.engine.hint}"
        if not moving:
            return "others were before it"
        age = f"{now - moving.phase_since:.0f}s"
        if moving.asked:
            return (f"{moving.asked.name} has been busy for {age} with work that did not come through"
                    f" stadi, or outlived its connection{moving.asked.hint}")
        return f"it goes to {moving.name or 'nobody'}, in the phase {moving.phase} for {age} ({moving.why})"

    def _retry_after(self, engine):
        """Seconds to ask again after: what this engine's hand-over and the holder's job usually take."""
        moves = [(row["evict_ms"] + row["vram_ms"] + row["start_ms"]) / 1000
                 for row in self._ledger if row["to"] == engine.name and not row["error"]]
        jobs = [self._job_seconds(hold.engine) or 5 for hold in self._holds.values()]
        return max(1, min(600, round((median(moves) or 5) + sum(jobs[:1]))))

    def _job_seconds(self, engine):
        return median(self._seconds.get(engine, ()))
    def _has(self, engine):
        return self._owner is engine and not self._handover

    def _grant(self, hold, began=None):
        engine, now = hold.engine, self._clock()
        if any(other.engine is not engine for other in self._holds.values()):
            raise AssertionError("the promise: two engines would hold the card")
        if hold in self._waiters:
            self._waiters.remove(hold)
        hold.since, hold.began = now, now if began is None else began
        self._holds[hold.id] = hold
        self._tell("grant", hold=hold.id, engine=engine.name, kind=engine.kind, what=hold.what,
                   waited=now - hold.arrived)
        hold.wake()
        return hold

    def _end(self, hold):
        if self._holds.pop(hold.id, None):              # or it has ended already
            engine, now = hold.engine, self._clock()
            if engine.kind == IMAGE and hold.began is not None:
                self._seconds[engine].append(now - hold.began)
            self._tell("release", hold=hold.id, engine=engine.name, held=now - hold.since,
                       revoked=hold.revoked)
            self._advance()

    def _next(self):
        return choose(self._waiters, self._clock(), self._job_seconds) if self._waiters else None

    def _advance(self, moved=False):
        """Grant what can be granted, wake whom it concerns: after every change. moved: other limits count."""
        if self._handover and not self._handover.cancelled.is_set():
            self._still_wanted(self._handover)
        while (waiter := self._next()) and self._has(waiter.engine) and (
                waiter.engine.kind == LLM or waiter.joins and self._holds):     # a lone job asks the others
            self._grant(waiter)
        hold, now = next(iter(self._holds.values()), None), self._clock()
        in_way = hold.engine if hold else self._handover and self._handover.asked
        blocked = bool(in_way) and in_way.kind == LLM       # LLM holds, or their drain
        if blocked != (self._blocked_since is not None):
            self._blocked_total, self._blocked_since = self._blocked(), now if blocked else None
            moved = True
        for other in self._waiters if moved else ():
            other.wake()
        if not (self._holds or self._waiters):
            self._idle_since = now
        if waiter or self.closed or self._idle_left() is not None:
            self._work.notify_all()

    def _still_wanted(self, moving):
        """Rule 5: a hand-over outlives its requester unless the next in line is for another engine."""
        waiter, requester = self._next(), moving.requester
        lost = requester and requester not in self._waiters
        if lost and waiter and waiter.engine is moving.to:
            moving.requester = waiter
        elif (lost and (waiter or moving.asked)
              or waiter and waiter.ahead and moving.to not in (None, waiter.engine)   # who wants it waits on
              or waiter and not moving.to and moving.phase == "vram" and [waiter.engine] == moving.evict
              and not waiter.engine.stoppable):     # its process lives, its memory is its own
            moving.cancelled.set()

    def _idle_left(self):
        """Seconds until the owner's time is up, or a warm-up is due; None where no clock runs."""
        after = self._owner.idle_after if self._owner else 0 if self._cold else None
        if after is None or self._holds or self._waiters or self._handover or self.closed:
            return None
        return self._idle_since + after - self._clock()

    def run(self):
        """The mover's life: every hand-over, one after the other. Never returns."""
        while True:
            with self._lock:
                while not (due := self._due()):
                    self._work.wait(self._idle_left())
            try:
                if due is self._handover:
                    self.move(due)
                else:
                    self.revoke(due, "nobody waits for it any more")
            except Exception:               # whatever it is: the card must not stay on its way for ever
                log.exception("the mover failed")
                with self._lock:
                    self._handover = self._owner = None

    def _due(self):
        """What the mover has to do now: a Handover, a Hold to end for the next in line, or None."""
        waiter, left, holds = self._next(), self._idle_left(), list(self._holds.values())
        if waiter and all(
                hold.unwanted and not hold.revoked and hold.engine is not waiter.engine for hold in holds):
            if holds:
                return holds[0]
            evict = [engine for engine in self._engines if engine is not waiter.engine or engine.lent]
            self._handover = Handover(waiter.engine, waiter.what, waiter, evict, self._clock())
            if waiter.engine is not self._owner:
                self._handover.phase_since = waiter.arrived     # in its drain_ms: what was in flight
        elif left is not None and left <= 0:
            to, why, evict = (None, "idle", [self._owner]) if self._owner else (self.warm[0], "warm", [])
            self._handover = Handover(to, why, None, evict, self._clock())
        return self._handover

    def move(self, moving):
        """Carry out one hand-over, and tell everybody how it ended."""
        error = None
        try:
            self._vacate(moving)
            if moving.to:
                self._phase(moving, "start")
                if moving.cancelled.is_set():
                    raise GivenUp
                moving.started = bool(moving.to.ready(moving.cancelled))
        except (Refused, GivenUp) as failure:
            error = failure
        except Exception as failure:        # a fault of stadi's own must not cost the card
            log.exception("hand-over failed")
            error = Refused(500, f"the hand-over failed: {failure!r}")
        self._finish(moving, error)

    def _vacate(self, moving):
        """Evict whoever is resident, and wait for the VRAM."""
        self._phase(moving, "drain")
        answers = {engine.name: engine.resident() for engine in self._engines
                   if engine is not moving.to or engine.lent}
        self._residents.update(answers)
        there = [engine for engine in self._engines if answers.get(engine.name, False) is not False]
        residents = [engine for engine in there if engine in moving.evict]
        for engine in residents:
            self._drain(moving, engine)
        if moving.cancelled.is_set() or moving.own and there:       # a warm-up never evicts
            raise GivenUp
        if not residents:
            return
        self._phase(moving, "evict")
        row, gone = moving.row, []
        row["vram_before"] = self._vram.used()
        for engine in residents:
            eviction = engine.evict()
            self._residents[engine.name] = False if eviction.verified else None
            gone += [engine.name] if eviction.freed else []
            row["from"] = ",".join(gone) or None
            row["vram_before"] = row["vram_before"] if eviction.before is None else eviction.before
            moving.note(eviction.note)
        if gone and not (moving.to and moving.to.resident()):
            self._phase(moving, "vram")
            alone = all(self._residents[engine.name] is False for engine in there)
            warning = self._vram.wait_back(row["vram_before"], alone, cut=moving.cancelled.is_set,
                                           nudge=lambda: [engine.nudge() for engine in residents])
            moving.note(warning)
            for engine in residents if not warning else ():
                engine.evicted()
        row["vram_after"] = self._vram.used()

    def _drain(self, moving, engine):
        """Rule 6: work that outlives its connection, or bypasses stadi, is known only to the engine."""
        limit, pause, began = moving.to and moving.to.drain_limit or engine.busy_limit, 0.05, self._clock()
        while not moving.cancelled.is_set() and engine.busy():
            with self._lock:
                moving.asked = engine
                self._advance()
            if limit and self._clock() >= began + limit:
                return moving.note(f"{engine.name} was still busy after {limit:g}s; evicted anyway")
            moving.cancelled.wait(pause)
            pause = min(0.5, pause * 2)

    def _phase(self, moving, phase):
        with self._lock:
            self._timed(moving, phase)
            if phase == "evict" and self._owner in moving.evict:
                self._owner = None          # from here on it may be gone
            self._advance(moved=True)
            self._tell("phase", to=moving.name, phase=phase, why=moving.why)

    def _timed(self, moving, phase):
        now = self._clock()
        moving.row[f"{moving.phase}_ms"] += round((now - moving.phase_since) * 1000)
        moving.phase, moving.phase_since, moving.asked = phase, now, None

    def _finish(self, moving, error):
        with self._lock:
            self._timed(moving, "done")
            refused = isinstance(error, Refused)
            self._handover, self._cold = None, self.warm and not moving.to
            if refused or moving.row["from"] or moving.started or moving.to not in (None, self._owner):
                moving.row.update(at=time.time(), error=error and (str(error) or "given up"))
                self._ledger.append(moving.row)
                self._tell("handover", **moving.row)
            if error is None:
                self._owner = moving.to if moving.to in self._engines else None
            self._tell("owner", engine=self._owner and self._owner.name)
            if refused:
                self._refuse([w for w in self._waiters if error.everyone or w.engine is moving.to], error)
            elif error is None and moving.to:
                self._residents[moving.to.name] = None          # it may load at any moment now
                waiter = moving.requester if moving.requester in self._waiters else self._next()
                if waiter and waiter.engine is moving.to:
                    self._grant(waiter, moving.began)
                elif moving.own and not (waiter or self.closed):    # rule 11: this is a hold as well
                    hold = self._grant(Hold(moving.to, moving.why, self._clock()))
                    hold.unwanted = True
                    if not start(self.warm[1], hold):
                        self._end(hold)
            self._advance(moved=True)

    def holds(self):
        with self._lock:
            return list(self._holds.values())

    def snapshot(self):
        """Everything that the status shows, at one moment."""
        with self._lock:
            now, moving, left, waiter = self._clock(), self._handover, self._idle_left(), self._next()
            if self._holds and waiter and waiter.engine is not self._owner:     # what is in flight ends first
                moving = Handover(waiter.engine, waiter.what, waiter, (), waiter.arrived)
            holds = [{"id": hold.id, "engine": hold.engine.name, "kind": hold.engine.kind, "what": hold.what,
                      "since_s": now - hold.since, "job": hold.job, "unwanted": hold.unwanted}
                     for hold in self._holds.values()]
            usual = moving and median([row[f"{moving.phase}_ms"] / 1000 for row in self._ledger
                                       if row["to"] == moving.name and not row["error"]])
            return {
                "state": holds[0]["kind"] if holds else moving.to.kind if moving and moving.to else "idle",
                "holder": {**holds[0], "holds": holds} if holds else None,
                "in_flight": {kind: sum(hold["kind"] == kind for hold in holds) for kind in (LLM, IMAGE)},
                "waiting": [{"kind": waiter.engine.kind, "engine": waiter.engine.name, "what": waiter.what,
                             "waited_s": now - waiter.arrived, "limit_s": waiter.limit or None}
                            for waiter in self._waiters],
                "handover": moving and {"to": moving.name, "phase": moving.phase, "why": moving.why,
                                        "phase_s": now - moving.phase_since, "usual_s": usual},
                "resident": dict(self._residents), "idle_left_s": None if left is None else max(0.0, left),
                "handovers": list(self._ledger)}

# ----- Child ------------------------------------------------------------------------------------------------
# sd-server frees its weights only by ending, so it is a child process, and its existence is the state. Its
# group is killed as a whole; what left the group is found by the token in its environment. If stadi itself is
# killed, a small shell on a pipe (the guard) kills the group; what that missed is ended by the next start.

TERM_SECONDS, KILL_SECONDS = 3.0, 10.0      # TERM to KILL (sd-server needs 0.1); KILL to "the driver hangs"
LOG_BYTES, TAIL_BYTES, TOKEN, NAMESPACE = 10 * MIB, 65536, "STADI_CHILD", os.stat("/proc/self/ns/pid").st_ino
GUARD = 'read -r _; kill -s KILL -- "-$0"'      # dash knows no "kill -9 --"

def life(pid):
    """[process group, start in clock ticks since boot] of a process; None if there is none, or a zombie."""
    fields = proc(f"{pid}/stat").rpartition(b")")[2].split()
    return [int(fields[2]), int(fields[19])] if len(fields) > 19 and fields[0] not in (b"Z", b"X") else None

def token_for(port, owner):
    """What the children for this port of a stadi (a pid of this namespace) carry in their environment."""
    alive = life(owner)
    return f"{port}-{NAMESPACE}-{owner}-{alive and alive[1]}"

def token_of(pid):
    found = re.search(rf"(?:^|\0){TOKEN}=([^\0]+)", proc(f"{pid}/environ").decode("utf-8", "replace"))
    return found[1] if found else ""

def kin(groups, token, inode=""):
    """Live processes in one of the process groups, or that carry the token, or have that socket."""
    return [pid for pid in pids() if pid != os.getpid() and (alive := life(pid)) and (
        alive[0] in groups or token_of(pid) == token or inode and inode in sockets_of(pid))]

def end_kin(groups, token, inode=""):
    """Kill them until none is left, for 2 s at most; returns those that are."""
    end = time.monotonic() + 2.0
    while (found := kin(groups, token, inode)) and time.monotonic() < end:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return found

def orphans(port):
    """Tokens for this port that are carried though the stadi that gave them has ended."""
    pattern = rf"{port}-{NAMESPACE}-(\d+)-\d+"
    carried = [re.fullmatch(pattern, token) for token in set(map(token_of, pids()))]
    return [found[0] for found in carried if found and found[0] != token_for(port, found[1])]

def end_orphans(port):
    """End the children of stadis that were killed, and their groups; never a stranger."""
    for token in orphans(port):
        groups = {alive[0] for pid in kin((), token) if (alive := life(pid))}
        log.warning("ending sd-server (pids %s), left behind by an earlier stadi", kin(groups, token))
        end_kin(groups, token)

def listening_sockets():
    """{inode: port} of the TCP sockets that listen on this machine."""
    rows = re.findall(rb":(\w{4}) \S+ 0A (?:\S+ +){5}(\d+) ", proc("net/tcp") + proc("net/tcp6"))
    return {inode.decode(): int(port, 16) for port, inode in rows}
def listeners(port):
    return {inode for inode, other in listening_sockets().items() if other == port}

def sockets_of(pid):
    """Inodes of a process's sockets; empty when it may not be looked at."""
    found = set()
    for path in glob.glob(f"/proc/{pid}/fd/*"):
        with contextlib.suppress(OSError):
            found.update(re.findall(r"socket:\[(\d+)\]", os.readlink(path)))
    return found

def who_listens(inodes):
    """Words for the processes behind these sockets: pid and name."""
    found = [f"pid {pid} ({name_of(pid)})" for pid in pids() if inodes & sockets_of(pid)]
    return ", ".join(found) or "a process of another user"

class SpawnError(Exception):
    """The child could not be started; the text names the file and the cause."""

def why_not(error):
    """An OSError in words: the file, and the cause, where that of exec's is alike for several."""
    name, cause = error.filename, error.strerror or str(error)
    if error.errno == errno.ENOENT and name and os.path.exists(name):
        cause = "its interpreter (the first line) is missing"
    return f"{name} cannot be used: {cause}" if name else cause

class Child:
    """One life of the sd-server process. Made by spawning it, or SpawnError; ends by stop() or by itself."""
    def __init__(self, argv, port, folder):
        self.port, self.since = port, time.monotonic()
        self.ready, self._process = False, None     # ready: set by Sd.ready(), until stop(): it has answered
        self.gone = threading.Event()           # its whole group has ended; .how tells then how it did
        self.log_file, self._token = os.path.join(folder, "sd-server.log"), token_for(port, os.getpid())
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with open(self.log_file, "ab") as output:
                self._trim_log()
                self._log_start = os.path.getsize(self.log_file)
                self._process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                    env={**os.environ, TOKEN: self._token})
            self.pid = self._process.pid
            self._pidfd = os.pidfd_open(self.pid)
            guard = ["/bin/sh", "-c", GUARD, str(self.pid)]
            self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
            if not start(self._reap):
                raise OSError("no threads left")
        except OSError as error:
            if self._process:                           # not without a guard
                end_kin({self._process.pid}, self._token)
                self._process.wait()
            raise SpawnError(why_not(error)) from None

    def _reap(self):
        """Waits for the leader's death, ends what is left of it, and only then frees its pid."""
        while not ready(1.0, (self._pidfd, select.POLLIN)):
            with contextlib.suppress(OSError):
                self._trim_log()
        os.close(self._pidfd)
        if left := end_kin({self.pid}, self._token):
            log.error("helpers of sd-server cannot be killed: pids %s", left)
        with self._guard:
            self._guard.kill()
        code = self._process.wait()
        self.how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        self.gone.set()
        log.info("sd-server (pid %d) ended: %s", self.pid, self.how)

    def _trim_log(self):
        """Keep the log under LOG_BYTES, with one older generation; the child's own descriptor appends."""
        if os.path.getsize(self.log_file) > LOG_BYTES:
            with open(self.log_file, "rb") as now, open(self.log_file + ".1", "wb") as older:
                now.seek(-LOG_BYTES, os.SEEK_END)
                older.write(now.read(LOG_BYTES))        # not to its end: the child goes on writing
            os.truncate(self.log_file, 0)
            self._log_start = 0

    def log_tail(self):
        """The last lines of this life's log, of a progress bar only its last state."""
        with contextlib.suppress(OSError), open(self.log_file, "rb") as file:
            file.seek(max(self._log_start, os.path.getsize(self.log_file) - TAIL_BYTES))
            rows = map(str.strip, file.read(TAIL_BYTES).decode("utf-8", "replace").split("\n"))
            return [row.rpartition("\r")[2] for row in rows if row]
        return []

    def listening(self):
        """Whether it listens on its port. Raises SpawnError if a stranger does too, or it does elsewhere."""
        ports = listening_sockets()
        inodes = {inode for inode, port in ports.items() if port == self.port}
        own = set().union(*map(sockets_of, kin({self.pid}, self._token) if inodes else [self.pid]))
        if not inodes and (others := [ports[inode] for inode in own & ports.keys()]):
            raise SpawnError(f"it listens on {others[0]}; write --listen-port {self.port} into -sd-args")
        if inodes - own and life(self.pid) and not self.gone.is_set():      # not of one that has just died
            raise SpawnError(f"port {self.port} is held by {who_listens(inodes - own)} as well")
        return bool(inodes & own)

    def stop(self, seconds=TERM_SECONDS, kill_seconds=KILL_SECONDS):
        """TERM, then KILL after these seconds. True when it is gone; False when even KILL does not end it."""
        self.ready = False
        for sig, wait in ((signal.SIGTERM, seconds), (signal.SIGKILL, kill_seconds)):
            if not self.gone.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, sig)
                    os.killpg(self.pid, signal.SIGCONT)         # a stopped one hears no TERM
                self.gone.wait(wait)
        return self.gone.is_set()

# ----- Engines ----------------------------------------------------------------------------------------------
CALL_SECONDS, HURRY_SECONDS, CALL_BYTES = 5.0, 1.0, 64 * MIB    # bounds on one call (ComfyUI's queue is long)
POLL_LAST, WARM_SECONDS, JOB_SECONDS = 0.5, 600.0, 30.0         # JOB: ComfyUI answers late while it loads
FORCE_SECONDS, RESULT_SECONDS, RESULT_BYTES = 2.0, 600.0, 256 * MIB     # results: of a child that may be gone

class Trouble(ValueError):
    """An engine that could not be asked: why, and what to do."""

class Misfit(Trouble):
    """It answered, but not as this engine must: no waiting mends that."""

def abort(connection):
    """Wake whoever waits on an http.client connection, from any thread."""
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)

def parsed(content, **hooks):
    """JSON, or None for what is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(content, **hooks)
def member(value, key):
    """value[key], or None where value is no object that has it."""
    return value.get(key) if isinstance(value, dict) else None

class Engine:
    """What the Card and the followers ask of an engine. A new one is a class and one line in the wiring."""
    name, kind, title = "nobody", "idle", ""        # as it is, it stands for the card freed by hand
    greeting, hint = "", ""     # what it is asked once at the start; what to say to those who wait for it
    headers = {}                # of stadi's own calls to it
    idle_after = None           # seconds without a hold until the card frees itself of it; None never
    busy_limit = 0              # seconds to wait for work that only it knows of; 0: a waiter's limit ends it
    job_bound = 0               # seconds that one job may take; 0 none
    jobs = ()                   # paths whose work goes on after the answer, beside other such work
    accepts = 0, ""             # the status of an answer whose job goes on, and where in it the job's id is
    drain_limit = 0             # seconds that it waits for such work of the others; 0: by their busy_limit
    lent = False                # to another each time: evicted before the next; a limit is of the whole wait
    fresh = stoppable = False   # a new connection for each request; work that nobody wants can be ended

    def __init__(self, endpoint, bound=0):
        self.endpoint, self.trouble, self._bound = endpoint, "", bound      # bound: seconds of one eviction
        self._patience = min(bound or CALL_SECONDS, CALL_SECONDS)
    def _nothing(self, *_):
        """What most engines say to the verbs below; each defines resident() and evict() for itself."""

    resident = _nothing     # (): whether it may have VRAM now; None when it can't be told
    evict = _nothing        # (): free it: an Eviction. Raises Refused when nothing may be loaded beside it
    nudge = _nothing        # (): said again while its VRAM has not come back
    evicted = _nothing      # (): its VRAM was seen to have come back
    busy = _nothing         # (): whether it works on something that stadi holds nothing for
    ready = _nothing        # (cancelled): make it usable; True if it was not. Raises Refused, GivenUp
    spares = _nothing       # (path, request, body): whether this request plainly never uses the GPU
    ended = _nothing        # (job, seconds left): "ended"; "queued" behind others; else it runs, or who knows
    finished = _nothing     # (job): it has ended; called by its follower before the card is let go
    give_up = _nothing      # (job; None: of unknown id): it outlived its bound, or lost its hold by hand

    def ask(self, method, path, body=None, seconds=None, most=CALL_BYTES, hold=None):
        """One request of stadi's own: (status, body). Bounded as a whole; cut with its hold; or Trouble."""
        seconds = seconds or self._patience
        connection = http.client.HTTPConnection(*self.endpoint, timeout=seconds)
        over, began = threading.Event(), time.monotonic()
        try:
            if hold:
                hold.on_revoke = functools.partial(abort, connection)
            connection.connect()
            start(lambda: over.wait(seconds) or abort(connection))      # without: only each recv is bounded
            if hold and hold.revoked:
                raise ValueError(hold.revoked)
            connection.request(method, path, body and json.dumps(body), {
                "Connection": "close", "Content-Type": "application/json", **self.headers})
            answer = connection.getresponse()
            content = answer.read(most + 1)
            if len(content) > most or answer.length:
                raise ValueError(f"the answer was cut short, or is longer than {most >> 20} MiB")
            return answer.status, content
        except (OSError, http.client.HTTPException, ValueError) as error:
            if hold and hold.revoked:
                raise Trouble(hold.revoked) from None
            late = time.monotonic() - began >= seconds
            why = f"no answer in {seconds:g}s" if late else getattr(error, "strerror", "") or str(error)
            why += "; is it running?" if isinstance(error, ConnectionRefusedError) else ""
            raise self.note(f"{self.endpoint} {method} {path}: {why or type(error).__name__}") from None
        finally:
            over.set()
            connection.close()

    def look(self, path, take, seconds=None, advice=()):
        """What take(answer) finds in the JSON that a GET gives. Raises Trouble; its words: advice[status]."""
        status, content = self.ask("GET", path, seconds=seconds)
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
            if status == 200:
                return take(parsed(content))
        text = dict(advice).get(status, f"GET {path} gave {status} and nothing that can be used")
        raise self.note(text, Misfit)

    def note(self, trouble, kind=Trouble):
        """Remember, and log once, what is wrong with this engine ("": nothing); returned, to be raised."""
        if trouble and trouble != self.trouble:
            log.warning("%s: %s", self.title, trouble)
        self.trouble = trouble
        return kind(trouble)

    def job_of(self, status, body):
        """The id of the job that goes on after this answer, or None."""
        job = member(parsed(body), self.accepts[1]) if status == self.accepts[0] else None
        return job if isinstance(job, str) else None

    def probe(self):
        """Asked at the start, and by -check. Raises Trouble."""
        self.look(self.greeting, str)

    def describe(self):
        return {"url": f"http://{self.endpoint}", "kind": self.kind, "error": self.trouble or None}

class Loader(Engine):
    """One that loads models on demand, and unloads them by request. holding() names those that have VRAM;
    _unload(name, asked) asks one to go, and adds it to asked if once is enough. Both raise Trouble."""
    kind, pause, bounded_by = LLM, 0.05, "-vram-wait"       # pause: seconds between its first two polls
    doubtful = False            # its list can be empty for a moment (a reload), or not come at all

    def resident(self):
        with contextlib.suppress(Trouble):
            holding = self.holding()
            self.note("")
            return bool(holding)

    def evict(self):
        asked, empty, pause, end = set(), 0, self.pause, time.monotonic() + self._bound
        while True:
            try:
                holding = self.holding()
                empty = 0 if holding else empty + 1
                if empty > bool(asked and self.doubtful):
                    return Eviction(bool(asked), True)
                for name in set(holding) - asked:
                    self._unload(name, asked)
                note, done = f"kept {', '.join(holding)} for {self._bound:g}s ({self.bounded_by})", False
            except Trouble as error:
                note, done = f"could not be unloaded: {error}", not (asked and self.doubtful)
            if done or time.monotonic() > end:
                return Eviction(bool(asked) or not done, False, f"{self.title} {note}; went on")
            time.sleep(pause)
            pause = min(POLL_LAST, pause * 1.5)

class Router(Loader):
    """llama.cpp's router: llama-server without a model."""
    name, title = "llama", "llama.cpp's router"
    ADVICE = {401: "it wants its --api-key: set -llm-key (STADI_LLM_KEY)",
              404: "GET /models gave 404: is it llama-server in router mode?",
              200: "it can't be unloaded: start llama-server in router mode, without -m"}

    def __init__(self, endpoint, key, busy_wait, unload_wait):
        super().__init__(endpoint, unload_wait)
        self.busy_limit, self.headers = busy_wait, {"Authorization": f"Bearer {key}"} if key else {}

    def holding(self, statuses=("loading", "loaded", "sleeping")):      # an unload would stop a download
        return self.look("/models", lambda answer: [
            str(name) for row in answer["data"] if row["status"].get("value") in statuses
            for name in (row.get("id"), *(row.get("aliases") or ())) if name], advice=self.ADVICE)

    def probe(self):
        loaded = self.holding(("loaded",))
        if loaded and not self.slots(loaded[0]):
            raise Trouble("it has no /slots (--no-slots): what outlives its client is not seen")

    def _unload(self, name, asked):
        if self.ask("POST", "/models/unload", {"model": name})[0] in (200, 400):
            asked.add(name)

    def busy(self):
        """Generations outlive connections. Only `loaded` models are asked: asking a sleeping one wakes it."""
        with contextlib.suppress(Trouble):
            return any(member(slot, "is_processing") for name in self.holding(("loaded",))
                       for slot in self.slots(name))

    def slots(self, name):
        """A model's slots; none where the router does not tell (--no-slots)."""
        query = urllib.parse.urlencode({"model": name, "autoload": "false"})
        slots = parsed(self.ask("GET", f"/slots?{query}")[1])
        return slots if isinstance(slots, list) else ()

    def loaded(self, wanted):
        """Whether each of these models is loaded, so that asking about them loads nothing."""
        with contextlib.suppress(Trouble):
            return set(wanted) <= set(self.holding(("loaded",)))

class Sd(Engine):
    """stable-diffusion.cpp's sd-server, as stadi's child."""
    name, kind, title = "sd", IMAGE, "sd-server"
    fresh = stoppable = True    # it has eight threads, one per connection: none may be kept idle
    jobs, accepts = ("/sdcpp/v1/img_gen", "/sdcpp/v1/vid_gen"), (202, "id")
    ENDS = "completed", "failed", "cancelled"

    def __init__(self, endpoint, argv, folder, idle_after, load_wait, render_wait):
        super().__init__(endpoint)
        self.idle_after, self.job_bound, self._load_wait = idle_after or None, render_wait, load_wait
        self._argv, self._folder = argv, folder
        self.child, self._lock, self._results = None, threading.Lock(), {}    # id -> (when, the answer)

    def resident(self):
        return self.child is not None and not self.child.gone.is_set()

    @property
    def serving(self):
        """Up, loaded, and not on its way out."""
        return self.resident() and self.child.ready and life(self.child.pid) is not None

    def evict(self):
        there = self.resident()
        if there and not self.child.stop():
            self.note(f"pid {self.child.pid} does not end even by KILL (a hung driver?): nothing can be"
                      " loaded beside it; restart the machine if it stays")
            raise Refused(503, f"sd-server {self.trouble}", "child_stuck", 60, everyone=True)
        self.note("")
        return Eviction(there, True)

    def ready(self, cancelled):
        """Ready is: alive, it (not a stranger) listens, it answers. The port opens only after the load."""
        if self.serving:
            return False
        self.evict()
        try:
            if inodes := listeners(self.endpoint.port):
                raise SpawnError(f"port {self.endpoint.port} is held by {who_listens(inodes)}; end it, or let"
                                 " sd-server have another port (-sd, and --listen-port in -sd-args)")
            self.child = child = Child(self._argv, self.endpoint.port, self._folder)
            log.info("sd-server started: pid %d, log %s", child.pid, child.log_file)
            while not child.ready:
                if child.gone.wait(0.05):
                    words = "; ".join(child.log_tail()[-8:]) or "its log is empty"
                    raise SpawnError(f"it ended while loading ({child.how}): {words}")
                if cancelled.is_set():
                    self.evict()
                    raise GivenUp
                if time.monotonic() > child.since + self._load_wait:
                    raise SpawnError(f"no answer in {self._load_wait:g}s (-load-wait); log: {child.log_file}")
                with contextlib.suppress(Trouble):
                    if child.listening():
                        self.ask("GET", "/sdcpp/v1/capabilities")
                        child.ready = child.listening()     # once more: who answered was the child
            self.note("")
            return True
        except SpawnError as error:
            self.evict()
            self.note(str(error))
            raise Refused(502, f"sd-server did not start: {error}", "engine_error") from None

    def ended(self, job, seconds):
        """Its result is kept: the child's memory ends with the child."""
        try:
            path = f"/sdcpp/v1/jobs/{urllib.parse.quote(job, safe='')}"
            status, content = self.ask("GET", path, seconds=seconds, most=RESULT_BYTES)
            self.note("")
        except Trouble:
            return None if self.serving else "ended"
        state = member(parsed(content), "status") if status == 200 else None
        if state in self.ENDS:
            self.keep(job, content)
        return "ended" if status in (404, 410) or state in self.ENDS else state

    def keep(self, job, content):
        """Keep a finished job's answer, bounded by age and size, the oldest out first."""
        with self._lock:
            kept = {name: row for name, row in self._results.items() if name != job and self.result(name)}
            kept[job] = (time.monotonic(), content)
            while sum(len(content) for _, content in kept.values()) > RESULT_BYTES:
                del kept[next(iter(kept))]
            self._results = kept

    def result(self, job):
        at, content = self._results.get(job, (0.0, None))
        return content if time.monotonic() - at <= RESULT_SECONDS else None
    def give_up(self, job):
        self.evict()
    def describe(self):
        child = self.child if self.resident() else None
        return {**super().describe(), "pid": child and child.pid, "ready": self.serving, "log_file":
                os.path.join(self._folder, "sd-server.log"), "up_s": child and time.monotonic() - child.since}

def unambiguous(pairs):
    """An object whose keys are ASCII, lower case and not repeated; None for others."""
    value, keys = dict(pairs), "".join(key for key, _ in pairs)
    return value if len(value) == len(pairs) and keys.isascii() and keys == keys.lower() else None

class Ollama(Loader):
    """Ollama: an unload is answered before it happens, and a model that is being loaded is not in /api/ps."""
    name, title, greeting = "ollama", "Ollama", "/api/version"
    pause, doubtful, bounded_by = 0.1, True, "-unload-timeout"
    NOTHING = {"/api/generate": ({}, {"prompt": ""}), "/api/chat": ({}, {"messages": []})}     # to generate

    def holding(self):
        return self.look("/api/ps", lambda answer: [str(row["name"]) for row in answer["models"]])

    def _unload(self, name, asked):
        asked.add(name)
        if not 200 <= self.ask("POST", "/api/generate", {"model": name, "keep_alive": 0})[0] < 300:
            self.ask("POST", "/api/embed", {"model": name, "input": "x", "keep_alive": 0})      # old servers

    def spares(self, path, request, body):
        """The unload form, and cloud models, if the body is small, plain and can be read in one way only: Go
        matches keys without regard to case, the last one wins, and it stops after the first value."""
        plain = body and body.isascii() and not re.search(rb"(?im)^content-encoding:", request.fields)
        value = parsed(body, object_pairs_hook=unambiguous) if plain else None
        model, keep = member(value, "model"), member(value, "keep_alive")
        if not isinstance(model, str):
            return False
        rest = {key: value[key] for key in value if key not in ("model", "keep_alive", "stream")}
        unload = keep in (0, "0", "0s") and keep is not False and rest in self.NOTHING.get(path, ())
        return unload or re.search(r":(cloud|[^:/]*-cloud)\Z", model)

    def warm(self, card, hold, model):
        """Load a model as work that nobody waits for: cut as soon as a request for another engine waits."""
        body = {"model": model, "keep_alive": -1}
        try:
            with contextlib.suppress(Trouble):          # logged already, or cut for the next
                status, _ = self.ask("POST", "/api/generate", body, seconds=WARM_SECONDS, hold=hold)
                log.info("warming %s ended with status %d", model, status)
        finally:
            card.release(hold)

class Comfy(Engine):
    """ComfyUI: jobs run after their answer, in its queue; if it has VRAM can't be asked, only remembered."""
    name, kind, title, greeting, accepts = "comfy", IMAGE, "ComfyUI", "/system_stats", (200, "prompt_id")
    hint = ("; if a node of its workflow asked for this, it waits for itself: point the node, and OLLAMA_HOST"
            " of Ollama itself, at Ollama's own address instead of stadi's")

    def __init__(self, endpoint, keep, job_timeout, used):
        super().__init__(endpoint)
        self.idle_after, self.job_bound, self._used = keep, job_timeout, used
        self._vram, self._before = "used", None         # then asked, before: at so many bytes; then freed
        self.given_up, self._stuck = [], 0      # jobs that nobody follows; looks in a row that saw none run

    def reading(self):
        """Its card's memory: a Reading. What others can have is vram_free - torch_vram_free, device-wide."""
        total, free, torch = self.look("/system_stats", lambda answer: [
            int(answer["devices"][0][name]) for name in ("vram_total", "vram_free", "torch_vram_free")])
        return Reading(total - (free - torch), total)

    def _queue(self, seconds=None):
        """(the jobs that run, all jobs that run or wait). Raises Trouble."""
        running, waiting = self.look("/queue", lambda answer: [
            [str(row[1]) for row in answer[f"queue_{state}"]] for state in ("running", "pending")], seconds)
        return running, running + waiting

    def busy(self):
        """Whether its queue has work, apart from what was given up; None when it can't be told."""
        with contextlib.suppress(Trouble):
            if not self.given_up:
                return self.look("/prompt", lambda answer: answer["exec_info"]["queue_remaining"] > 0)
            ids = self._queue()[1]
            self.given_up = [job for job in self.given_up if job in ids]
            return any(job not in self.given_up for job in ids)

    def resident(self):
        """Work that reached it past stadi fills the card as well."""
        self._patience = CALL_SECONDS
        busy = self.busy()
        if busy is None:                    # it hangs: what follows in this hand-over does not wait so again
            self._patience = HURRY_SECONDS
        else:
            self.note("")
        if busy:
            self._vram, self._before = "used", None
        return self._vram != "freed"

    def evict(self):
        try:
            if self._vram == "used":
                self._free()
            return Eviction(True, True, before=self._before)
        except Trouble as error:                # what answers is asked again: nudge()
            note = f"{self.title} could not be freed: {error}; went on"
            return Eviction(isinstance(error, Misfit), False, note)

    def _free(self):
        status, _ = self.ask("POST", "/free", {"unload_models": True, "free_memory": True})
        if status != 200:
            raise Misfit(f"POST /free gave {status}")
        self._vram = "asked"

    def nudge(self):
        """A /free just after a job's end can sleep through its wake-up: said again, it is heard."""
        with contextlib.suppress(Trouble):
            self._free()
    def evicted(self):
        self._vram = "freed"
    def ready(self, cancelled):
        self._vram, self._before, self._patience = "used", None, CALL_SECONDS

    def ended(self, job, seconds):
        """An accepted job is in the queue, then in the history; in neither when deleted, or all died."""
        path = f"/history/{urllib.parse.quote(job, safe='', errors='surrogatepass')}"
        with contextlib.suppress(Trouble):
            if job in self.look(path, dict.keys, seconds):
                return "ended"
            running, jobs = self._queue(seconds)
            if job not in jobs:
                return "ended"
            self._stuck = 0 if running else self._stuck + 1
            self.note("jobs wait and none runs: its worker died; restart ComfyUI" if self._stuck > 10 else "")

    def finished(self, job):
        if self.idle_after == 0:
            self._before = self._used()
            self.nudge()

    def give_up(self, job):
        with contextlib.suppress(Trouble):              # released before its answer: all there is
            self.given_up += [job] if job else self._queue()[1]
        self.finished(job)

class Lease(Engine):
    """A command that stadi.py run lends the card to: it has memory until the VRAM is seen to be back."""
    name, kind, title, idle_after, lent, _there = "lease", IMAGE, "a command", 0.001, True, False
    hint = "; if that command asked for this, it waits for itself: point it at the engine's own address"

    def resident(self):
        return self._there                      # None: given back, and not yet seen to be
    def ready(self, cancelled):
        self._there = True
    def evict(self):
        self._there = None                      # it ended, or there would be a hold
        return Eviction(True, True)
    def evicted(self):
        self._there = False

def follow(card, hold):
    """A follower's life: keep hold until its job has ended, or has outlived its engine's job_bound; while it
    is queued behind others, their clock runs."""
    engine, job, pause, bound = hold.engine, hold.job, 0.1, hold.engine.job_bound or float("inf")
    end, over = time.monotonic() + bound, threading.Event()
    hold.on_revoke = over.set
    fields = {"fields": {"engine": engine.name, "prompt_id": job}}
    log.info("image job: accepted", extra=fields)
    try:
        while not (over.wait(pause) or hold.revoked):
            state = engine.ended(job, max(0.1, min(JOB_SECONDS, end - time.monotonic())))
            if state == "ended":
                log.info("image job: ended", extra=fields)
                return engine.finished(job)
            if state == "queued":
                end = time.monotonic() + bound
            if time.monotonic() > end:
                log.warning("%s: job %s not ended within %gs: let go", engine.title, job, bound)
                return engine.give_up(job)
            pause = min(POLL_LAST, pause * 1.5)
    except Refused as error:
        log.error("%s", error)
    finally:
        card.release(hold)
        log.info("image job: card let go", extra=fields)

# ----- Routes -----------------------------------------------------------------------------------------------
# The engines match on the decoded path, the router also on the decoded query. The class is chosen twice, on
# the path as it came and on the decoded, cleaned one; where they differ a GPU route could hide: a 400.

TAKE, PASS, WATCH, OWN, STEER = "take", "pass", "watch", "own", "steer"

class BadMessage(Refused):
    """Bytes that are no clean HTTP, or a target of two meanings; answered, and the connection closed."""
    def __init__(self, text, status=400):
        super().__init__(status, text, "invalid_request_error")

Route = collections.namedtuple("Route", "kind engine path")     # engine: name, "" for OWN; path: cleaned
READS = ("GET", "HEAD")
PLAIN = r"/(?:(?!\.{0,2}(?:/|$))[A-Za-z0-9_.-]+(?:/|$))*"       # no %, no //, no dot segment
OWN_PATHS = r"/status|/healthz|/gpu-turnstile/release|/stadi(?:/(?:events|free|load|lease|release))?"

LLAMA_SD = (        # methods (None: all), path, class (two: without, with a model in the query), engine
    (READS, r"/metrics", (OWN, WATCH), "llama"),
    (("POST",), r"/v1/images/.+|/sdapi/v1/(?:txt2img|img2img)|/sdcpp/v1/(?:img_gen|vid_gen)", TAKE, "sd"),
    (None, r"/v1/images/.+|/sdapi(?:/.*)?|/sdcpp(?:/.*)?", WATCH, "sd"),
    (None, r"/cors-proxy/?", TAKE, "llama"),                    # it can fetch the router's own URLs
    (READS, PLAIN, (PASS, WATCH), "llama"),                     # with a model in the query it loads it: watch
    (("POST",), r"/models|/models/unload|/v1/streams/lookup", PASS, "llama"),
    (("DELETE",), r"/models|/v1/stream", PASS, "llama"),
    (("POST",), r"/v1/chat/completions/control", STEER, "llama"),
    (None, r".*", TAKE, "llama"))

def passing(engine, gated, *own):
    """The rows of a front that passes everything but its own and the gated POSTs."""
    return (*own, (("POST",), gated, TAKE, engine), (None, r".*", PASS, engine))

OLLAMA = passing(
    "ollama", r"/api/(?:generate|chat|embed|embeddings)|/v1/(?:(?:chat/)?completions|embeddings|responses"
    r"|messages|audio/transcriptions|images/generations|images/edits)", (READS, r"/metrics", OWN, ""))

def decoded(text):
    """Percent-decoding as the engines' HTTP library does it: %XX, and %uXXXX."""
    return re.sub("%u([0-9A-Fa-f]{4})|%([0-9A-Fa-f]{2})", lambda code: chr(int(code[1] or code[2], 16)), text)

def cleaned(path):
    """The path without fragment, doubled slashes, dot segments and trailing slash."""
    path = path.partition("#")[0].replace("\\", "/").replace("\0", "?")     # Python 3.11.3 ends it at a NUL
    return os.path.normpath("/" + path.lstrip("/"))

def query_values(query, key):
    """All values of a key in a query, decoded as the router decodes them."""
    if "%" not in query and key not in query:
        return []
    pairs = (part.partition("=") for part in query.replace("+", " ").split("&"))
    return [decoded(value) for name, _, value in pairs if decoded(name) == key]

def table(engine, rows, strict=False):
    """How a front classifies: a function of a request's method and its target as it came to its Route; raises
    BadMessage. strict: what does not look canonical never passes without the card."""
    rows = ((("OPTIONS",), r".*", PASS, engine), (None, OWN_PATHS, OWN, ""), *rows)

    def row(method, path):
        """(class, engine); the last row is for everything."""
        return next((kind, engine) for methods, pattern, kind, engine in rows
                    if (methods is None or method in methods) and re.fullmatch(pattern, path, re.DOTALL))

    @functools.lru_cache(4096)
    def route(method, path, named):
        clean, (kind, engine) = cleaned(decoded(path)), row(method, path)
        plain = kind not in (PASS, WATCH) or method == "OPTIONS" or re.fullmatch(PLAIN, path)
        if strict and not plain or row(method, clean) != (kind, engine):
            raise BadMessage("this path can be read in two ways; write it plainly")
        return Route(kind[named] if type(kind) is tuple else kind, engine, clean)

    def classify(method, target):
        path, _, query = target.partition("?")
        return route(method, path, bool(query and query_values(query, "model")))

    return classify

# ----- Wire -------------------------------------------------------------------------------------------------
# What is ambiguous is refused, never repaired. One compiled expression judges a whole head, in C, without
# backtracking (possessive quantifiers); a second finds the few fields that matter; the rest goes on as it is.

HEAD_BYTES, FIELDS_MOST, NAMED_MOST, CHUNK_EXT, TRAILER_BYTES = 64 * 1024, 256, 32, 1024, 8192
CHUNK_LINE = 2 + 15 + 1 + CHUNK_EXT + 2     # CRLF, digits, ";", extension, CRLF
HEAD_SECONDS, INTERIM_MOST = 10.0, 64   # from a head's first byte to its last; 1xx before the answer

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_FIELDS = rb"((?:" + _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*+\r\n)*+)"
_TARGET = rb"([A-Za-z0-9\-._~!$&'()*+,;=:@%/?\[\]|{}^]++)"
REQUEST = re.compile(rb"(" + _TOKEN + rb") " + _TARGET + rb" HTTP/1\.([01])\r\n" + _FIELDS + rb"\r\n")
ANSWER = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d(?: [\t\x20-\x7e\x80-\xff]*+)?+)\r\n" + _FIELDS + rb"\r\n")
CHUNK = re.compile(rb"(?:\r(?:\n(?:([0-9A-Fa-f]{1,15}+)(?:;[\t\x20-\x7e\x80-\xff]{0,%d}+)?+"
                   rb"(?:\r(\n)?+)?+)?+)?+)?+" % CHUNK_EXT)     # also each beginning of it, without group 2
NOT_TEXT = re.compile(rb"[^\t\r\n\x20-\x7e\x80-\xff]|(?<!\r)\n|\r[^\n]|^\r|^[\x80-\xff]")
HOST = re.compile(r"(?a)(?!.{300})(?:[\w-]++(?:\.[\w-]++)*+\.?|\[(?=[\da-f.]*+:)[\da-f:.]++\])(?::\d{1,5})?")

# Hop-by-hop (RFC 9110, 7.6.1), Expect (answered here), and what stadi sets itself. NOTED reads lower case.
_STRIPPED = (rb"connection|keep-alive|proxy-connection|proxy-authenticate|proxy-authorization|te|trailer"
             rb"|transfer-encoding|upgrade|expect|x-forwarded-(?:for|host|proto)")
NOTED = re.compile(rb"\n(" + _STRIPPED + rb"|content-length|host|origin|sec-fetch-site):([^\r]*)")
STRIP = re.compile(rb"(?im)^(?:" + _STRIPPED + rb"):[^\n]*\n")
UPGRADE, CLOSE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"Connection: close\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n"
PASSED = frozenset((b"content-length", b"host", b"origin", b"sec-fetch-site"))
ONCE = PASSED | {b"transfer-encoding"}                        # in one head
FRAMES = (b"content-length", b"transfer-encoding", b"host")   # no trailer and no Connection token names these
NAMELESS = frozenset((b"", b"close", b"keep-alive", b"upgrade", b"te", *FRAMES))   # tokens that strip nothing

class Body:
    """A body of known length, or (inf) up to its connection's end. feed() says how many bytes of data belong
    to it, and are sound; payload, a list, gets them without any framing."""
    def __init__(self, length):
        self.left, self.done = length, length == 0

    def feed(self, data, payload=None):
        taken = min(self.left, len(data))
        self.left -= taken
        self.done = self.left == 0
        if payload is not None:
            payload.append(data[:taken])
        return taken

NOTHING, UNTIL_END = Body(0), Body(float("inf"))    # of heads that name none; shared: no feeding changes them

@functools.lru_cache(1024)
def chunk_size(line):
    """The size in a chunk's first line, with the CRLF before it; None while the line is not whole."""
    found = CHUNK.fullmatch(line)
    if not found:
        raise BadMessage("the size of a chunk cannot be read, or the chunk before it is longer than it says")
    return int(found[1], 16) if found[2] else None

def trailers_end(data, at):
    """Where the trailers end that begin there, behind a CRLF; None while they are not whole."""
    end = data.find(b"\r\n\r\n", at - 2)
    fields = data[at:end + 2] if end >= 0 else data[at:]
    if len(fields) > TRAILER_BYTES or end >= 0 and (not re.fullmatch(_FIELDS, fields) or any(
            name in FRAMES for name, _ in NOTED.findall(b"\n" + fields.lower()))):
        raise BadMessage("the trailers cannot be read")
    return end + 4 if end >= 0 else None

class Chunked:
    """A chunked body, judged as it passes; its bytes go on as they are. What can't be judged yet (a size line
    cut in two) is not counted: the caller hands it in again with more behind it. Raises BadMessage."""
    done = _inside = False      # inside: the CRLF behind a chunk's data has not come
    left = 0                    # of the chunk's data

    def feed(self, data, payload=None):
        added = 0 if self._inside else 2
        if added:
            data = b"\r\n" + data              # so that one stands before every size line
        at, left, end, find = 0, self.left, len(data), data.find
        while True:
            at += left
            if payload is not None:
                payload.append(data[at - left:at])
            if at > end:
                self.left, self._inside = at - end, True
                return end - added
            line = data[at:find(b"\n", at + 2, at + CHUNK_LINE) + 1 or at + CHUNK_LINE]
            left = chunk_size(line)
            if not left:
                break
            at += len(line)
        if left == 0 and (whole := trailers_end(data, at + len(line))):
            self.done = True
            return whole - added
        self.left, self._inside = 0, line[:2] != b"\r\n"
        return at - added if self._inside else at + 2 - added

class Head:
    """Of a request or an answer: the fields that go on, and the body; otherwise is that of a head without."""
    named = ()                          # the tokens of Connection

    def __init__(self, minor, fields, otherwise):
        self.minor, self.fields = minor == b"1", fields
        values = self.values = {}       # lower-cased; of fields that stand there again, joined
        for name, value in NOTED.findall(b"\n" + fields.lower()):
            if name in values:
                if name in ONCE:
                    raise BadMessage(f"{name.decode()} stands there more than once")
                value = values[name] + b"," + value
            values[name] = value.strip(b"\t ")
        if not PASSED.issuperset(values):
            self.fields = STRIP.sub(b"", fields)
            self.named = [token.strip(b"\t ") for token in values.get(b"connection", b"").split(b",")]
        if fields.count(b"\n") > FIELDS_MOST or len(self.named) > NAMED_MOST:
            raise BadMessage("too many header fields", 431)
        for token in self.named and set(self.named) - NAMELESS:
            self.fields = re.sub(rb"(?im)^" + re.escape(token) + rb":[^\n]*\n", b"", self.fields)
        length, coding = values.get(b"content-length"), values.get(b"transfer-encoding")
        if coding is not None and (length is not None or not self.minor or coding != b"chunked"):
            raise BadMessage("Transfer-Encoding must be chunked, alone, on HTTP/1.1")
        self.body = Chunked() if coding else otherwise
        if length is not None:
            if not (length.isdigit() and len(length) <= 18):
                raise BadMessage("Content-Length must be 1 to 18 digits")
            self.body = Body(int(length))

METHODS = frozenset(("GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH"))
class Request(Head):
    """A request's head. Raises BadMessage."""
    def __init__(self, head):
        found = REQUEST.fullmatch(head)
        if not found:
            raise BadMessage("this is no clean HTTP/1.1 request head")
        method, target, minor, fields = found.groups()
        super().__init__(minor, fields, NOTHING)
        self.method, self.target, values = method.decode(), target.decode(), self.values
        if self.method not in METHODS:
            raise BadMessage("this method is not served", 405 if method in (b"CONNECT", b"TRACE") else 501)
        self.host = values.get(b"host", b"").decode("latin-1")
        if not HOST.fullmatch(self.host):
            raise BadMessage("Host must stand there once, as a name or address with or without a port")
        if not target.startswith(b"/") and (method, target) != (b"OPTIONS", b"*"):
            url = re.fullmatch(r"(?i:http)://([^/?]+)(/.*|)", self.target)
            if not url or url[1].lower() != self.host:
                raise BadMessage("the target must be a path, or an http URL that agrees with Host")
            self.target = url[2] or "/"
        if len(target) > 8190:
            raise BadMessage("the target is too long", 414)
        self.keep = self.minor and b"close" not in self.named
        self.upgrade = (b"upgrade" in self.named and values.get(b"upgrade") == b"websocket" and self.minor
                        and method == b"GET" and self.body.done)
        self.expects = self.minor and b"expect" in values
        if self.expects and values[b"expect"] != b"100-continue":
            raise BadMessage("Expect can only be 100-continue", 417)

    def upstream_head(self, forwarded, close):
        """The head as it goes to the engine. forwarded: the client's X-Forwarded-For and -Proto lines."""
        connection, framing = UPGRADE if self.upgrade else CLOSE if close else b"", b""
        if isinstance(self.body, Chunked):
            framing = CHUNKS
        elif self.body is NOTHING and self.method not in ("GET", "HEAD", "OPTIONS"):
            framing = b"Content-Length: 0\r\n"          # the engines wait for seconds without it
        line = f"{self.method} {self.target} HTTP/1.1\r\nX-Forwarded-Host: {self.host}\r\n".encode()
        return b"".join((line, self.fields, forwarded, connection, framing, b"\r\n"))

class Answer(Head):
    """An answer's head, read strictly from a connection; Upstream's response_class. Raises BadMessage."""
    def __init__(self, sock, method, interim=None):
        self._sock, self._method, self._interim = sock, method, interim     # interim: gets heads of 102, 103
        self.rest = b""                                                     # bytes read behind the head

    def begin(self):
        for _ in range(INTERIM_MOST):
            minor, line, fields = self._next_head()
            super().__init__(minor, fields, UNTIL_END)
            self.line, self.status = b"HTTP/1.1 " + line + b"\r\n", int(line[:3])
            if self.status >= 200 or self.status == 101:
                break
            if self._interim and self.status != 100:
                self._interim(self.line + self.fields + b"\r\n")
        else:
            raise BadMessage("the engine never came to its real answer")
        if self._method == "HEAD" or self.status in (101, 204, 304):
            self.body = NOTHING
        if self.status in (101, 204):
            self.fields = re.sub(rb"(?im)^content-length:[^\n]*\n", b"", self.fields)
        self.closes = not self.minor or b"close" in self.named or self.body is UNTIL_END
        return self

    def _next_head(self):
        data = self.rest
        while (end := data.find(b"\r\n\r\n")) < 0 and len(data) <= HEAD_BYTES and not NOT_TEXT.search(data):
            more = self._sock.recv(65536)
            if not more:
                raise ConnectionResetError("it closed the connection before its answer was there")
            data = data + more if data else more
        found, self.rest = ANSWER.fullmatch(data, 0, end + 4), data[end + 4:]
        if not found:
            raise BadMessage("the engine's answer has no clean head")
        return found.groups()

# ----- Relay ------------------------------------------------------------------------------------------------
# Sockets block, with the kernel's own time limits (settimeout would poll before each call). So a thread that
# waits in recv or send can only be woken by a shutdown of its socket: the Watcher's, when a client leaves.

SMALL, LARGE = 64 * 1024, 1 << 20       # bytes of one recv; LARGE once a body is known to be long
SO_MEMINFO, TCP_ESTABLISHED = 55, b"\1"         # linux/socket.h (first word: bytes queued), tcp_states.h
SPOOL_BYTES, COPY_BYTES = 4 * MIB, 4 * MIB      # kept of a body that waits; of an answer that may name a job
CONNECT_SECONDS, LINGER_SECONDS, REUSE_SECONDS, VANISHED_SECONDS = 5.0, 2.0, 2.0, 60
SLOW_SECONDS, SLOW_BYTES = 10.0, 640 * 1024     # a body that holds the card brings that much in that time
LATE = "the render took longer than -render-wait (-job-timeout)"

def bound_socket(sock, receive, send):
    """Blocking, without Nagle, with limits in seconds (0: none) kept by the kernel; notices dead peers."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_SECONDS * 1000)
    for option, limit in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit), int(limit % 1 * 1e6)))

def reset_at_close(sock):
    """Make the close an RST: the end must not look like one."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

class Client:
    """A client's connection: the socket, the bytes read ahead of use, and whether it left."""
    def __init__(self, sock, stall):
        self.sock, self.stall, self.buf = sock, stall or 86400.0, b""
        self.left, self._action = False, lambda: None
        self.unread = False                     # bytes of a request that nobody will read may be on their way

    def on_leave(self, action=lambda: None):
        """What to do as soon as the client is known to have left; at once if it has."""
        self._action = action
        if self.left:
            action()

    def leaves(self):
        """Told by the Watcher, or by a send that failed."""
        self.left = True
        self._action()

    def recv(self, size):
        """Raises Gone when it closed, was reset, or sent nothing for -keepalive (the kernel's limit)."""
        try:                                    # suppress() would cost more than the rest
            if more := self.sock.recv(size):
                return more
        except OSError:
            pass
        raise Gone

    def send(self, data):
        """Raises Gone when it left, or took nothing for `stall` seconds."""
        try:
            self.sock.sendall(data)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                log.info("a client took nothing for %gs (-stall): cut off", self.stall)
                self.unread = False                     # no FIN before the RST
                reset_at_close(self.sock)
            self.leaves()
            raise Gone from None

    def offer(self, data):
        """Send, for one whose work goes on without it: nothing more once it left."""
        if not self.left:
            with contextlib.suppress(Gone):
                self.send(data)

    def read_head(self):
        """The next head's bytes. Raises BadMessage; Gone when the client closed, or stayed idle."""
        data, started, seen = self.buf, 0.0, 0
        while not 0 <= (end := data.find(b"\r\n\r\n")) <= HEAD_BYTES:
            if len(data) > HEAD_BYTES:
                raise BadMessage("the head is too large", 431 if b"\r\n" in data[:HEAD_BYTES] else 414)
            if data:                # a TLS hello, or noise, can't become a head any more: no deadline for it
                line, whole, _ = data.partition(b"\r\n")        # each byte is judged once: a head may drip
                if NOT_TEXT.search(data, max(0, seen - 1)) or (
                        whole and seen < len(line) + 2 and not REQUEST.match(line + b"\r\n\r\n")):
                    raise BadMessage("this is no clean HTTP/1.1 request head")
                seen = len(data)
                started = started or time.monotonic()
                if not ready(started + HEAD_SECONDS - time.monotonic(), (self.sock, select.POLLIN)):
                    raise BadMessage(f"the head was not complete within {HEAD_SECONDS:g}s", 408)
            try:
                self.buf = data = data + self.recv(SMALL)
            except Gone:
                raise BadMessage("the head was cut short") if data else Gone
        self.buf = data[end + 4:]
        return data[:end + 4]

    def body(self, request, engine=None, pressed=False):
        """The sound bytes of a request's body, as they come, or until engine (a socket) has something to say.
        pressed: the card is held for it. Raises BadMessage (408: it is slow to come), Gone."""
        if request.expects and not (request.body.done or self.buf):
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")     # nothing can refuse the body any more
        request.expects, since, size = False, time.monotonic(), 0
        limit = min(self.stall, SLOW_SECONDS) if pressed else self.stall
        sources = [(sock, select.POLLIN) for sock in (self.sock, engine) if sock]
        while not request.body.done:
            count = request.body.feed(self.buf)
            block, self.buf, size = self.buf[:count], self.buf[count:], size + count
            if pressed and time.monotonic() - since >= SLOW_SECONDS:
                if size < SLOW_BYTES:
                    raise BadMessage(f"under {SLOW_BYTES} bytes in {SLOW_SECONDS:g}s, holding the card", 408)
                since, size = time.monotonic(), 0
            if block:
                yield block
            elif not (events := ready(limit, *sources)) and limit == self.stall:
                raise BadMessage(f"nothing came for {limit:g}s in the middle of a body (-stall)", 408)
            elif engine and engine.fileno() in events:
                return
            elif events:
                self.buf += self.recv(4 * SMALL)

class Watcher:
    """One thread that learns of every client that leaves: RST or FIN (a half-close too, as for nginx and Go).
    Not of one whose bytes lie unread by the megabyte; so bodies are read before waiting."""
    def __init__(self):
        self._epoll, self.clients = select.epoll(), {}          # clients by file descriptor, of all fronts
    def add(self, client):
        self.clients[client.sock.fileno()] = client
        self._epoll.register(client.sock.fileno(), select.EPOLLRDHUP | select.EPOLLET)

    def run(self):
        while True:
            for number, _ in self._epoll.poll():
                client = self.clients.get(number)
                with contextlib.suppress(OSError, ValueError):
                    # asked again, since the event may be that of an earlier socket with this number
                    if client and ready(0, (client.sock, select.POLLRDHUP)):
                        client.leaves()

class Spool:
    """A body that waits: in memory, beyond SPOOL_BYTES in a temporary file."""
    def __init__(self):
        self.size, self._file = 0, io.BytesIO()

    def add(self, block):
        """Raises Refused when the disk is full."""
        try:
            if self.size <= SPOOL_BYTES < self.size + len(block):
                memory, self._file = self._file.getvalue(), tempfile.TemporaryFile()
                self._file.write(memory)
            self._file.write(block)
            self._file.flush()
        except OSError as error:
            raise Refused(507, f"the body cannot be kept while it waits: {error.strerror}; free some disk"
                               " (TMPDIR)", "insufficient_storage") from None
        self.size += len(block)

    def whole(self):
        """All bytes, where they are few; else None."""
        return self._file.getvalue() if self.size <= SMALL else None

    def blocks(self):
        self._file.seek(0)
        return iter(functools.partial(self._file.read, LARGE // 4), b"")

    def close(self):
        with contextlib.suppress(OSError):      # of a full disk once more
            self._file.close()

class Upstream(http.client.HTTPConnection):
    """A connection to an engine, kept for one client: the Watcher shuts it when that client leaves. Made by
    connecting, or Refused."""
    response_class, idle_since = Answer, 0.0

    def __init__(self, engine, stall):
        super().__init__(*engine.endpoint)
        self.engine = engine
        try:
            self.sock = socket.create_connection(engine.endpoint, CONNECT_SECONDS)
            if self.sock.getsockname() == self.sock.getpeername():
                raise OSError("nothing listens there")      # in the ephemeral range a connect can meet itself
        except OSError as error:
            raise Refused(502, f"{engine.title} cannot be reached at {engine.endpoint}: "
                               f"{error.strerror or error}; is it running?", "engine_error") from None
        bound_socket(self.sock, 0, stall)

    def fits(self):
        """Whether, kept, it may carry one more: only if young (the engine may close it, and nothing is sent
        twice), connected both ways, and without a byte unread. ready() would tell, by a thread switch."""
        with contextlib.suppress(OSError):              # old kernels don't know
            state = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            queued = self.sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, 4)
            young = time.monotonic() - self.idle_since < REUSE_SECONDS
            return young and state == TCP_ESTABLISHED and queued == bytes(4)

    abort = abort               # wakes whoever waits on it, from any thread

class Exchange:
    """One request's way to its engine and back. on_left: what a client's leaving leads to instead of the end
    (a render goes on anyway, and only its connection tells when it ends)."""
    status = 0                          # of the answer whose head is on its way to the client
    _ends_bare = False                  # the client takes the connection's end for the answer's

    def __init__(self, client, request, forwarded, hold=None, on_left=None):
        self.client, self.request, self.forwarded, self.hold = client, request, forwarded, hold
        self.on_left, self.copied = on_left, bytearray()    # copied: of an answer that may name a job
        self._send = client.offer if on_left else client.send

    def run(self, upstream, spool):
        """True if upstream may be used again. Raises Refused; Gone when the client left, or when an answer
        that it has in part broke off: only the connection's end can tell it now."""
        self.upstream = upstream
        if self.hold:
            self.hold.on_revoke = upstream.abort
        self.client.on_leave(self.on_left or upstream.abort)
        try:
            if self.hold and self.hold.revoked:
                raise ConnectionAbortedError        # nobody could abort it until here; _failure() says why
            answer = self._ask(spool)
            return self._upgrade(answer) if answer.status == 101 else self._deliver(answer)
        except (OSError, BadMessage) as error:
            raise self._failure(error) from None
        finally:
            self.client.on_leave()

    def _failure(self, error):
        """What an exchange that broke raises, from what is known of why."""
        title, revoked = self.upstream.engine.title, self.hold and self.hold.revoked
        if revoked == LATE:
            failure = Refused(504, LATE, "timeout")
        elif revoked:
            failure = Refused(503, f"the hold on the card was taken away: {revoked}", "released", 1)
        elif self.client.left:
            return Gone()
        else:
            failure = Refused(502, f"{title}: {str(error) or type(error).__name__}", "engine_error")
        if not self.status:
            return failure
        log.warning("an answer of %s to %s broke off: %s", title, self.request.method, failure)
        if self._ends_bare:
            self.client.unread = False
            reset_at_close(self.client.sock)
        return Gone()

    def _ask(self, spool):
        """To the engine. Returns its answer, read up to the end of the head."""
        upstream, request = self.upstream, self.request
        whole, interim = spool.whole() if request.body.done else None, request.minor and self._send
        upstream.sock.sendall(request.upstream_head(self.forwarded, upstream.engine.fresh) + (whole or b""))
        try:
            if whole is None and not self._upload(spool):
                request.keep, self.client.unread = False, True
        except BadMessage as error:             # the client's fault, not the engine's
            raise Refused(error.status, str(error), error.kind) from None
        return upstream.response_class(upstream.sock, request.method, interim).begin()

    def _upload(self, spool):
        """Send the body; False as soon as the engine answers, or reads no further."""
        sock, stall = self.upstream.sock, self.client.stall
        for block in itertools.chain(spool.blocks(), self.client.body(self.request, sock, bool(self.hold))):
            view = memoryview(block)
            while view:
                events = ready(stall, (sock, select.POLLIN | select.POLLOUT))
                if not events:
                    raise Refused(504, f"the engine took nothing of the body for {stall:g}s", "timeout")
                if events[sock.fileno()] & select.POLLIN:
                    return False
                try:
                    view = view[sock.send(view, socket.MSG_DONTWAIT):]
                except BlockingIOError:
                    continue
                except OSError:
                    return False                # its answer may be there to read
        return self.request.body.done

    def _deliver(self, answer):
        """To the client. True if the engine's connection ends cleanly with this answer's end."""
        request, body, data, sock = self.request, answer.body, answer.rest, self.upstream.sock
        chunked, until_end = isinstance(body, Chunked), body is UNTIL_END
        bare = chunked and not request.minor            # HTTP/1.0 knows no chunks
        self._ends_bare = bare or until_end
        request.keep = request.keep and not self._ends_bare
        # goes with the first bytes of the body, or before a wait
        pending = b"".join((answer.line, answer.fields, CHUNKS if chunked and not bare else b"",
                            b"" if request.keep else CLOSE, b"\r\n"))
        looks = self.on_left and answer.status in (200, 202)
        while True:
            payload = [] if bare or looks else None
            count = body.feed(data, payload)
            block, data = data[:count], data[count:]
            if looks and len(self.copied) <= COPY_BYTES:
                self.copied += b"".join(payload)
            if bare:
                block = b"".join(payload)
            if pending or block:
                self.status = answer.status
                self._send(pending + block)
                pending = b""
            if body.done:
                return not data and not answer.closes
            if not (data or looks or chunked or until_end) and body.left > LARGE:
                view = memoryview(bytearray(LARGE))     # the bulk of a long body: through one buffer
                while body.left > LARGE and (count := sock.recv_into(view)):
                    self._send(view[:body.feed(view[:count])])
            if more := sock.recv(SMALL):
                data += more
            elif until_end and not (self.client.left or self.hold and self.hold.revoked):
                return False
            else:                                       # too early, or brought about from this side
                raise BadMessage("its answer was cut short")

    def _upgrade(self, answer):
        if not self.request.upgrade or answer.values.get(b"upgrade") != b"websocket":
            raise BadMessage("the engine switched protocols unasked")
        self.status, self.request.keep = 101, False
        self.client.on_leave()                      # a half-close is carried over
        self.client.send(answer.line + answer.fields + UPGRADE + b"\r\n" + answer.rest)
        tunnel(self.client.sock, self.upstream.sock, self.client.buf)
        return False

def tunnel(client, engine, first=b""):
    """Copy both ways until both ended. A half-close is carried over, a reset resets both; no idle limit."""
    peers = {client: engine, engine: client}
    waiting = {client: first, engine: b""}      # read from it, not yet taken by its peer; None: it has ended
    try:
        while any(data is not None for data in waiting.values()):
            ready(1e6, *((sock, events) for sock, peer in peers.items() if (events := (
                select.POLLIN if waiting[sock] == b"" else 0) | (select.POLLOUT if waiting[peer] else 0))))
            for sock, peer in peers.items():
                with contextlib.suppress(BlockingIOError):
                    if waiting[sock] == b"":
                        waiting[sock] = sock.recv(SMALL, socket.MSG_DONTWAIT) or None
                        if waiting[sock] is None:
                            peer.shutdown(socket.SHUT_WR)
                    if waiting[sock]:
                        waiting[sock] = waiting[sock][peer.send(waiting[sock], socket.MSG_DONTWAIT):]
    except OSError:
        for sock in peers:
            reset_at_close(sock)

# ----- Eyes -------------------------------------------------------------------------------------------------
NOT_PRINTED = r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]+"   # not for terminals
BOUNDS = (0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)   # of histograms, in seconds
SPANS = ("gpu_turnstile_unload_seconds",                                        # histograms
         *(f'gpu_turnstile_lock_wait_seconds{{kind="{kind}"}}' for kind in (LLM, IMAGE)),
         *(f'stadi_handover_seconds{{phase="{phase}"}}' for phase in PHASES))

class LogFormat(logging.Formatter):
    """One line a record, whatever stands in it: text, or JSON."""
    default_time_format, default_msec_format, as_json = "%Y-%m-%dT%H:%M:%S", "%s.%03d", False

    def format(self, record):
        at, message, fields = self.formatTime(record), record.getMessage(), getattr(record, "fields", {})
        if record.exc_info:
            message += " | " + self.formatException(record.exc_info)
        if self.as_json:
            return json.dumps({"time": at, "level": record.levelname, "msg": message, **fields})
        words = "".join(f" {key}={json.dumps(value)}" for key, value in fields.items())
        return re.sub(NOT_PRINTED, " ", f"{at} {record.levelname:7} {message}{words}")

class Eyes:
    """What people and programs look at. Of card, vram and engines (set by build()) nothing is kept here."""
    def __init__(self):
        self.started, self._lock = time.monotonic(), threading.Lock()
        self._counts = collections.Counter()            # (name and labels, as a pattern, values) -> how often
        self._spans = {span: [0] * (len(BOUNDS) + 2) for span in SPANS}         # see _add()
        self._owners = collections.deque(maxlen=2000)   # (unix time, who has the card from then on)
        self._levels = collections.deque(maxlen=2000)   # (unix time, bytes of VRAM used): see sample()
        self.readers = set()                            # Events to set when something has changed

    def _add(self, name, seconds):
        """Into a histogram: a count for each of BOUNDS, one of what is beyond, the sum."""
        if span := self._spans.get(name):
            span[bisect.bisect_left(BOUNDS, seconds)] += 1
            span[-1] += seconds

    def tell(self, event, **fields):
        """Told by the card, under its lock, at every transition."""
        level, name = logging.DEBUG, event
        if event == "owner" or fields.get("phase") == "drain":
            self._owners.append((time.time(), fields.get("engine", "→") or ""))
        elif event == "grant":
            self._add(f'gpu_turnstile_lock_wait_seconds{{kind="{fields["kind"]}"}}', fields["waited"])
        elif event == "handover":
            level, name = logging.INFO, "hand-over"
            for phase in PHASES:
                self._add(f'stadi_handover_seconds{{phase="{phase}"}}', fields[f"{phase}_ms"] / 1000)
            if fields["from"]:
                self._add("gpu_turnstile_unload_seconds", (fields["evict_ms"] + fields["vram_ms"]) / 1000)
            way = fields["from"] or "none", fields["to"] or "none"
            self._counts['stadi_handovers_total{from="%s",to="%s"}', *way] += 1
        for reader in tuple(self.readers):
            reader.set()
        if log.isEnabledFor(level):
            log.log(level, name, extra={"fields": {key: value for key, value in fields.items() if (
                key != "at" and value not in (None, [], ""))}})

    def count(self, front, kind, status):
        with self._lock:
            self._counts['stadi_requests_total{front="%s",class="%s",code="%s"}', front, kind, status] += 1

    def status(self):
        """The whole state, for JSON; waits for no engine, and for the card's meter a moment at most."""
        card, sd, meter = self.card.snapshot(), self.engines.get("sd"), self.vram.meter
        used, total = meter.read(0.25) or meter.last or (None, None)
        return {
            "version": VERSION, "uptime_s": time.monotonic() - self.started, **card,
            "resident": {name: engine.resident() if engine is sd else card["resident"].get(name)
                         for name, engine in self.engines.items()},
            "vram": {"used": used, "total": total, "floor": self.vram.floor, "source": meter.source,
                     "error": meter.error or None, "in_the_way": self.vram.in_the_way},
            "sd_child_up": bool(sd and sd.resident()), "sd": sd and sd.describe(),
            "engines": {name: engine.describe() for name, engine in self.engines.items()},
            "given_up": list(getattr(self.engines.get("comfy"), "given_up", ()))}

    def sample(self):
        """The life of a thread: the VRAM's level, for the picture of the last hour."""
        while self.vram.meter.source != "none":
            if reading := self.vram.meter.read():
                self._levels.append((time.time(), reading.used))
            time.sleep(SAMPLE_SECONDS if self.vram.meter.every < 0.1 else 12 * SAMPLE_SECONDS)   # a command

    def picture(self):
        """The status, with what the page draws besides."""
        status, sd, since = self.status(), self.engines.get("sd"), time.time() - 3600
        if sd:
            status["sd"]["log_tail"] = [re.sub(r"\x1b\[[\w;]*", "", line) for line in (
                sd.child.log_tail()[-12:] if sd.child else ())]
        def last_hour(rows):
            rows = list(rows)
            return rows[max(0, bisect.bisect(rows, (since,)) - 1):]    # with what it began with
        return {**status, "history": {"owners": last_hour(self._owners), "vram": last_hour(self._levels)}}

    def health(self):
        card = self.card.snapshot()
        pending = bool(card["in_flight"][IMAGE] or any(row["kind"] == IMAGE for row in card["waiting"]))
        return {"state": card["state"], "llm_inflight": card["in_flight"][LLM], "image_pending": pending}

    def metrics(self):
        """Prometheus' text format 0.0.4. The end of a name says of what type it is."""
        status = self.status()
        waiting = collections.Counter(row["kind"] for row in status["waiting"])
        holder, vram = (status["holder"] or {}).get("engine"), status["vram"]
        jobs = self._spans['gpu_turnstile_lock_wait_seconds{kind="image"}'][:-1]
        samples = {
            **{f'gpu_turnstile_state{{state="{state}"}}': int(status["state"] == state)
               for state in ("idle", LLM, IMAGE)},
            "gpu_turnstile_llm_inflight": status["in_flight"][LLM],
            "gpu_turnstile_image_jobs_total": sum(jobs), f'stadi_build_info{{version="{VERSION}"}}': 1,
            **{f'stadi_holder{{engine="{engine}"}}': int(engine == holder) for engine in self.engines},
            **{f'stadi_waiting{{kind="{kind}"}}': waiting[kind] for kind in (LLM, IMAGE)},
            "stadi_vram_used_bytes": vram["used"], "stadi_vram_total_bytes": vram["total"],
            "stadi_sd_child_up": int(status["sd_child_up"]),
            **{key[0] % key[1:]: count for key, count in list(self._counts.items())}}
        for span, (*counts, total) in self._spans.items():
            name, brace, label = span.partition("{")
            counts = list(itertools.accumulate(counts))
            for bound, count in zip((*BOUNDS, "+Inf"), counts):
                samples[f'{name}_bucket{{le="{bound}"{"," if label else "}"}{label}'] = count
            samples[f"{name}_sum{brace}{label}"], samples[f"{name}_count{brace}{label}"] = total, counts[-1]
        family = functools.partial(re.sub, r"(_bucket|_sum|_count)?({.*)?$", "")
        types, lines = {"total": "counter", "seconds": "histogram"}, []
        for name, rows in itertools.groupby(sorted(samples, key=family), family):
            lines += [f"# HELP {name} {name.replace('_', ' ')}",
                      f"# TYPE {name} {types.get(name.rpartition('_')[2], 'gauge')}",
                      *(f"{row} {samples[row]}" for row in rows if samples[row] is not None)]
        return "\n".join(lines) + "\n"

# ----- Page -------------------------------------------------------------------------------------------------
# What GET /stadi shows, with nothing from elsewhere: what /stadi/events says, as text and never as markup.
EVENT_PAUSE, EVENT_SECONDS, LEASE_SECONDS, SAMPLE_SECONDS = 0.2, 0.8, 15.0, 5.0
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
PAGE_HEAD = ("Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src"
             " 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'\r\nCache-Control: no-store\r\n")
PAGE = r"""<!doctype html><html lang="en"><meta charset="utf-8"><title>stadi</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light dark; --line: color-mix(in srgb, CanvasText 16%, Canvas); --hue: var(--line);
  --soft: color-mix(in srgb, CanvasText 70%, Canvas); background: color-mix(in srgb, CanvasText 5%, Canvas) }
[data-engine=llama] { --hue: #3b82f6 } [data-engine=sd] { --hue: #d9622b } [data-engine=comfy] {
  --hue: #a855f7 } [data-engine=ollama] { --hue: #0d9488 } [data-engine=lease] { --hue: #db4a8b }
[data-engine="→"] { --hue: CanvasText } body { margin: auto; padding: 1rem; max-width: 70rem;
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere } main { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)) } section, dialog, #banner {
  grid-column: 1 / -1; min-width: 0; background: Canvas; border: 1px solid var(--line); border-radius: 12px;
  padding: 1.25rem } .half { grid-column: auto } #state { border-left: .6rem solid var(--hue) } h1, h2 {
  font-size: 1rem; margin: 0 0 .5rem } p, ul { margin: .5rem 0; padding: 0 } small, th { color: var(--soft) }
#headline { font-size: clamp(1.75rem, 1rem + 3vw, 2.75rem); line-height: 1.15 } li { display: flex;
  flex-wrap: wrap; gap: .5rem 1rem; align-items: center } b { flex: 1 9rem } button { font: inherit;
  padding: .4rem 1rem; border: 1px solid var(--soft); border-radius: .5rem; background: Canvas } #banner {
  position: sticky; top: .5rem } #wrong, #banner { color: light-dark(#b3261e, #ff9a8f) } :focus-visible {
  outline: 3px solid #3b82f6 } [hidden], p:empty, table:has(tbody:empty) { display: none } .scroll, ul {
  overflow: auto; max-height: 22rem } #bar { height: 1.5rem; border-radius: .4rem;
  background: linear-gradient(90deg, #0000 var(--floor), CanvasText 0 calc(var(--floor) + 3px), #0000 0),
  linear-gradient(90deg, var(--soft) var(--used), var(--line) 0) } progress, svg, table { width: 100%;
  accent-color: var(--hue) } .key { display: inline-block; margin-right: 1.25rem } .key::before {
  content: "■ "; color: var(--hue) } svg { height: 8rem } rect { fill: var(--hue) } line {
  stroke-dasharray: 3 } line, polyline { fill: none; stroke: CanvasText; vector-effect: non-scaling-stroke }
#axis { display: flex; justify-content: space-between } #handovers :last-child { min-width: 15em }
pre, table { font-size: .85rem } table { border-collapse: collapse; overflow-wrap: normal } td, th {
  text-align: left; padding: .4rem 1rem .4rem 0; border-top: 1px solid var(--line); vertical-align: top }
</style><header><h1>stadi, who has the card <small id="version"></small></h1><p id="banner" role="alert"></p>
</header><main><section id="state"><div aria-live="polite"><h2 id="headline">…</h2><p id="phase"></p></div>
  <p id="since"></p><progress id="done" aria-label="Progress" hidden></progress><ul id="holds"></ul>
  <button data-do="free" title="What runs is not interrupted; then all is unloaded. The next request takes the
  card again: to keep it for a game, lend it, as in: stadi.py run -- GAME">Free the card</button>
  <button data-do="load?engine=sd" id="load" title="In its turn: then sd waits, loaded.">Load sd next</button>
  <p id="result" role="status"></p></section><section id="wrong" hidden><h2>Something is wrong</h2>
  <ul id="trouble"></ul></section><section class="half"><h2>Memory of the card</h2><div id="bar"></div>
  <p id="memory"></p><p id="resident"></p></section><section class="half"><h2>Queue</h2><p id="nobody"></p>
  <div class="scroll" tabindex="0" role="group" aria-label="Queue"><table><tr><th>Kind<th>What<th>Waited
  <th>Gives up after<tbody id="waiting"></table></div></section><section><h2>The last hour</h2>
  <svg id="hour" role="img" viewBox="0 0 3600 99" preserveAspectRatio="none"></svg>
  <small id="axis"><i>−60 min</i><i>−45</i><i>−30</i><i>−15</i><i>now</i></small><p id="legend"></p></section>
<section><h2>Hand-overs</h2><div class="scroll" tabindex="0" role="group" aria-label="Hand-overs"><table><tr>
  <th>When<th>From → to<th>Waited, ms<th>Unloaded, ms<th>Memory, ms<th>Started, ms<th>Why, and what went wrong
  <tbody id="handovers"></table></div></section><section><h2>Log of sd-server</h2>
  <pre class="scroll" id="log" tabindex="0" role="group" aria-label="Log"></pre></section></main>
<dialog id="ask" aria-labelledby="title" aria-describedby="effect"><form method="dialog"><h2 id="title"></h2>
  <p id="effect"></p><button>Cancel</button> <button id="yes"></button></form></dialog><script>
const $ = id => document.getElementById(id), drawn = {}, PHASES = {drain: "Waiting until what runs has ended",
  evict: "The memory is being given back", vram: "Waiting until the memory is really free", start: "Loading"};
function make(tag, attributes, ...children) {    // hostile text only ever becomes a text node
  const node = document.createElementNS($(/rect|line/.test(tag) ? "hour" : "ask").namespaceURI, tag);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  return node.append(...children), node;
}
function draw(id, data, nodes) {                 // only what changed, running times aside
  const key = JSON.stringify(data, (field, value) => field.endsWith("_s") ? undefined : value);
  if (drawn[id] !== (drawn[id] = key)) $(id).replaceChildren(...nodes);
}
const tell = texts => Object.keys(texts).forEach(id => draw(id, texts[id], [texts[id]]));
const rows = list => list.map(cells => make("tr", {}, ...cells.map(cell => make("td", {}, cell))));
const keys = list => list.map(([engine, text]) => make("span", {class: "key", "data-engine": engine}, text));
const NAMES = {llama: "llama (chats)", ollama: "Ollama (chats)", sd: "sd (pictures)", lease: "a command",
  comfy: "ComfyUI (pictures)", "→": "hand-over"}, named = engine => NAMES[engine] || engine || "nobody";
const gib = bytes => bytes == null ? "?" : `${(bytes / 2 ** 30).toFixed(1)} GiB`;
const span = s => s < 60 ? `${Math.floor(s)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
const clock = s => s == null ? "" : make("span", {"data-at": Date.now() - s * 1000}, span(Math.abs(s)));
function show({holder, handover, sd, vram, engines, waiting, resident, handovers, history, ...rest}) {
  const to = holder ? holder.engine : handover?.to, usual = !holder && handover?.usual_s;
  const verb = holder ? "is with" : to ? "goes to" : handover ? "gets free" : "is idle";
  const log = sd?.log_tail?.join(String.fromCharCode(10)) ?? "", left = rest.idle_left_s;
  const [, at, all, speed] = rest.sd_child_up && /[|] ([0-9]+)[/]([0-9]+) - (.*)$/.exec(log) || [];
  const since = holder ? holder.since_s : handover ? handover.phase_s : left == null ? null : -left;
  tell({headline: `The card ${verb} ${to ? named(to) : ""}`, nobody: waiting[0] ? "" : "Nobody waits.", log,
    phase: !handover ? "" : (holder ? `Next: ${named(handover.to)}, for ${handover.why}. ` : "")
      + PHASES[handover.phase] + (holder ? "" : `, for ${handover.why}`), version: rest.version,
    memory: `${gib(vram.used)} of ${gib(vram.total)} used`
      + (vram.floor == null ? "" : ` (the mark: ${gib(vram.floor)}, used without any model)`)});
  $("since").replaceChildren(since == null ? "" : since < 0 ? "What is loaded is unloaded in " : "For ",
    clock(since), usual ? `, usually ${span(usual)}` : "", all ? `: step ${at} of ${all}, ${speed}` : "");
  draw("holds", holder, (holder?.holds ?? []).map(({id, engine, kind, what, since_s, job, unwanted}) =>
    make("li", {}, make("b", {}, what), named(engine), job ? `job ${job}` : "", unwanted ? "unwanted" : "",
      clock(since_s), kind === "llm" ? "" : make("button", {"data-do": `release?id=${encodeURIComponent(id)}`,
      title: "It is ended, and loses the card to the next in line. Its result is lost."}, "Release"))));
  const wrong = [vram.error && `Memory: ${vram.error}`, ...rest.given_up.map(id => `Given up: ${id}`),
    ...Object.keys(engines).map(key => engines[key].error && `${key}: ${engines[key].error}`),
    ...vram.in_the_way.map(({pid, name, mib}) => `In the way: ${name} (process ${pid}), ${mib} MiB`)];
  draw("trouble", wrong, wrong.filter(Boolean).map(text => make("li", {}, text)));
  $("state").dataset.engine = to ?? "", $("done").value = Math.min(1, at / all) || 0;
  [$("wrong").hidden, $("load").hidden, $("done").hidden] = [!wrong.some(Boolean), sd?.ready !== false, !all];
  ["used", "floor"].forEach(at => $("bar").style.setProperty(`--${at}`, `${100 * vram[at] / vram.total}%`));
  draw("resident", resident, keys(Object.entries(resident).map(([engine, is]) =>
    [engine, `${engine}: ${is == null ? "not known" : is ? "loaded" : "not loaded"}`])));
  draw("waiting", waiting, rows(waiting.map(({kind, engine, what, waited_s, limit_s}) =>
    [kind, `${what}, ${named(engine)}`, clock(waited_s), limit_s == null ? "never" : span(limit_s)])));
  draw("handovers", handovers, rows(handovers.toReversed().map(({at, from, to, why, error, notes, ...ms}) =>
    [new Date(at * 1000).toLocaleTimeString(), `${named(from)} → ${named(to)}`, ...[ms.drain_ms, ms.evict_ms,
      ms.vram_ms, ms.start_ms].map(Math.round), [why, error, ...notes].filter(Boolean).join("; ")])));
  const start = Date.now() / 1000 - 3600, y = used => 99 - 65 * used / (vram.total ?? 2 ** 36), spent = {};
  const band = history.owners.map(([at, who], index, {[index + 1]: next}) => {
    const x = Math.max(0, at - start), width = Math.max(0, (next ? next[0] - start : 3600) - x);
    spent[who] = (spent[who] ?? 0) + width;
    return make("rect", {"data-engine": who, x, width: width + 3, height: 25});
  });
  draw("legend", spent, keys(Object.keys(spent).map(who => [who, `${named(who)} ${span(spent[who])} `])));
  $("hour").ariaLabel = `Who had it: ${$("legend").textContent}; below, the memory used`;
  $("hour").replaceChildren(...band, make("line", {x2: 3600, y1: y(vram.floor), y2: y(vram.floor)}),
    make("polyline", {points: [...history.vram, [start + 3600, vram.used ?? 0]].map(
      ([at, used]) => `${Math.max(0, at - start)},${y(used)}`).join(" ")}));
}
function ask(path, title, effect) {
  tell({title: `${title}?`, effect, yes: title}), $("ask").showModal();
  $("yes").onclick = async () => {
    tell({result: "Asking stadi…"});
    const reply = await fetch(`/stadi/${path}`, {method: "POST"}).catch(Response.error);
    const {error} = await reply.json().catch(() => ({error: "no answer"})), came = error?.message ?? error;
    tell({result: `${title}: ${came ?? "done"}`});
    if (path === "free" && reply.status === 503) ask("free?force=1", title, `${came} Now? What runs is cut.`);
  };
}
document.onclick = ({target: at}) => at.dataset.do && ask(at.dataset.do, at.textContent, at.title);
let stream, heard = Date.now();
function everySecond() {
  const open = stream?.readyState === EventSource.OPEN, silent = Date.now() - heard;
  if (open && silent > 15000) stream.close();           // stadi speaks every second: this one is dead
  if ((stream?.readyState ?? 2) === EventSource.CLOSED) stream = new EventSource("/stadi/events");
  stream.onmessage = ({data}) => { heard = Date.now(); show(JSON.parse(data)); };
  if (open) for (const node of document.querySelectorAll("[data-at]"))
    node.textContent = span(Math.abs(Date.now() - node.dataset.at) / 1000);
  tell({banner: open || silent < 1500 ? "" : "No connection to stadi, trying again. Below is the past."});
}
everySecond(), setInterval(everySecond, 1000);
</script>
"""

# ----- Front ------------------------------------------------------------------------------------------------
@functools.lru_cache(1024)
def own_name(host, allowed):
    """Whether a Host is one that no stranger can make a browser send (DNS rebinding)."""
    name = re.sub(r":\d+$", "", host).strip("[]").rstrip(".")
    return (is_ip(name) or "." not in name or name in allowed
            or name.endswith((".localhost", ".local", ".internal", ".lan", ".home.arpa")))

def own_origin(origin, host):
    """Whether a page of this origin may use stadi without being named: the Host's own, or this machine's."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(origin)
        usual, name = {"http": ":80", "https": ":443"}.get(parts.scheme), parts.hostname
        return usual and name and (parts.netloc == host.removesuffix(usual) or name.endswith(".localhost")
                                   or Endpoint(name, 0).loopback)

# One listening address. strict: stadi is the only guard of these engines (Host, Origin, no body on a GET);
# limits: kind -> seconds that a request waits for the card; gates: paths whose errors are read as ComfyUI's.
Front = collections.namedtuple("Front", "name classify strict limits gates", defaults=[()])

class Server(http.server.ThreadingHTTPServer):
    """Accepts; a thread for each connection. Never ends: main leaves the process."""
    shutdown_request = http.server.HTTPServer.close_request     # the handler has shut it down in its own way

    def __init__(self, endpoint, front, world):
        """An empty host is every address of both families. Raises OSError."""
        self.front, self.world = front, world           # world: settings, card, engines, eyes, watcher
        self.most = max(16, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64) // 3)      # connections
        super().__init__(endpoint, Handler, bind_and_activate=False)
        self.socket.close()
        everywhere = endpoint.host in ("", "::") and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere or ":" in endpoint.host else socket.AF_INET
        self.socket = socket.create_server(endpoint, family=family, backlog=1024, dualstack_ipv6=everywhere)
        self.server_address = self.socket.getsockname()

    def serve_forever(self):
        """All its threads on one CPU: to hand their lock to another costs half the speed (measured)."""
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {int(proc("self/stat").rpartition(b")")[2].split()[36])})
        super().serve_forever(3600)

    def get_request(self):
        """Where there are too many they wait, without a spin; the engines' connections get descriptors."""
        try:
            if len(self.world.watcher.clients) >= self.most:
                raise OSError(errno.EMFILE, f"more than {self.most} connections")
            return super().get_request()
        except OSError as error:
            log.error("no connection is accepted now (%s): raise ulimit -n", error.strerror)
            time.sleep(0.2)
            raise

    def handle_error(self, request, client_address):
        if not isinstance(error := sys.exc_info()[1], (OSError, Gone)):
            log.error("a connection failed: %r", error)

class Handler(http.server.BaseHTTPRequestHandler):
    """One client connection, request after request: from a route's class to card, relay or answer."""
    def setup(self):
        self.world, self.front, self.upstream = self.server.world, self.server.front, None
        settings, address = self.world.settings, self.client_address[0].removeprefix("::ffff:")
        self.client = Client(self.request, settings.stall)
        bound_socket(self.request, settings.keepalive, settings.stall)
        self.forwarded = f"X-Forwarded-For: {address}\r\nX-Forwarded-Proto: http\r\n".encode()
        self.world.watcher.add(self.client)

    def finish(self):
        """Close so that the client gets what was sent: what it still sends is drained for a moment."""
        # before the socket is closed (which takes it out of the epoll): another may have its number at once
        self.world.watcher.clients.pop(self.request.fileno(), None)
        if self.upstream:
            self.upstream.close()
        if self.client.unread:
            with contextlib.suppress(OSError):
                self.request.shutdown(socket.SHUT_WR)
                end, more = time.monotonic() + LINGER_SECONDS, (self.request, select.POLLIN)
                while ready(end - time.monotonic(), more) and self.request.recv(LARGE):
                    pass

    def handle_one_request(self):
        self.close_connection, self.route_kind, self.head, request = True, "none", b"", None
        try:
            self.head = self.client.read_head()
            request = Request(self.head)
            self.close_connection = not self._serve(request)
        except Gone:
            pass
        except Refused as error:
            self.close_connection = not self._refuse(request, error)
        except Exception:
            log.exception("a request failed")
            self._refuse(request, Refused(500, "stadi failed; its log has the reason", "server_error"))

    def _refuse(self, request, error):
        """Write an error in the shape that clients of this front read. True if the connection may go on."""
        text, path = str(error), cleaned(decoded(request.target.partition("?")[0])) if request else ""
        body = {"error": {"message": text, "type": error.kind, "code": error.status}}
        if path in self.front.gates:
            details = {"type": error.kind, "message": text, "details": "", "extra_info": {}}
            body = {"error": details, "node_errors": {}}
        elif self.front.name == "ollama" and path.startswith("/api/"):
            body = {"error": text}
        more = f"Retry-After: {error.retry_after or 5}\r\n" if error.status == 503 else ""
        return self._answer(request, error.status, body, more)

    def _answer(self, request, status, body, more="", kind="application/json"):
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        done = request and request.body.done
        keep = done and request.keep and status not in (400, 408) and not self.world.card.closed
        self.client.unread, more = not done, more + ("" if keep else "Connection: close\r\n")
        self.world.eyes.count(self.front.name, self.route_kind, status)
        head = (f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(content)}\r\n{more}\r\n").encode()
        self.client.send(head if (self.head or self.client.buf).startswith(b"HEAD ") else head + content)
        return keep

    def _serve(self, request):
        """Answer one request; True if the connection may go on."""
        route = self.front.classify(request.method, request.target)
        self.route_kind, request.upgrade = route.kind, request.upgrade and route.kind == PASS
        if self.front.strict or route.kind == OWN:
            self._guard(request, route)
        if route.kind == OWN:
            return self._own(request, route)
        if not (engine := self.world.engines.get(route.engine)):
            raise Refused(404, f"no {route.engine} is behind this stadi (-llm or -sd off)", "not_found_error")
        return {PASS: self._pass, WATCH: self._watch}.get(route.kind, self._take)(request, route, engine)

    def _guard(self, request, route):
        """The router and sd-server reflect any Origin, without a defence; Ollama and ComfyUI have their own.
        stadi's own routes are guarded everywhere; health checks come through other proxies."""
        settings, strict = self.world.settings, self.front.strict
        if strict and request.method in READS and not request.body.done:
            raise BadMessage(f"a {request.method} with a body: a form in it could name a model")
        free = route.kind == OWN and route.path in ("/healthz", "/metrics")
        if not free and not own_name(request.host, settings.allow_host):
            raise Refused(403, f"{request.host!r} is no name of stadi (-allow-host adds names)", "forbidden")
        uses = request.upgrade or route.kind in (TAKE, STEER)
        if request.method not in (*READS, "OPTIONS") or strict and uses:
            page = request.values.get(b"origin", b"").decode("latin-1")
            strange = b"origin" in request.values and not own_origin(page, request.host)
            cross = request.values.get(b"sec-fetch-site") == b"cross-site"
            if (strange or cross) and page not in settings.allow_origin:
                who = f"pages of {page!r}" if page else "pages of another site"
                raise Refused(403, f"{who} may not use stadi (-allow-origin names who may)", "forbidden")

    def _own(self, request, route):
        """stadi's own routes, by path: how it is asked, and who answers (with None: it has been done)."""
        eyes, path, query = self.world.eyes, route.path, request.target.partition("?")[2]
        looks = {"/status": eyes.status, "/healthz": eyes.health, "/metrics": eyes.metrics,
                 "/stadi": lambda: PAGE, "/stadi/events": self._events}
        deeds = {"free": self._free, "load": self._load, "lease": self._lease, "release": self._release}
        methods = READS if path in looks else ("POST",)
        if request.method not in methods:
            raise BadMessage(f"{path} is asked with {methods[0]}", 405)
        if not isinstance(request.body, Body) or request.body.left > SMALL:
            raise BadMessage(f"the body here has a Content-Length of at most {SMALL}", 413)
        body = b"".join(self.client.body(request))
        answer = looks[path]() if path in looks else deeds[path.rpartition("/")[2]](query, body)
        kind = {"/metrics": "text/plain; version=0.0.4; charset=utf-8",
                "/stadi": "text/html; charset=utf-8"}.get(path, "application/json")
        return answer is not None and self._answer(request, 200, answer, PAGE_HEAD, kind)

    def _events(self):
        """Server-sent events: the status at every change. A reader holds nothing, and blocks only itself."""
        news, eyes = threading.Event(), self.world.eyes
        self.client.on_leave(news.set)
        eyes.readers.add(news)
        try:
            self.client.send(STREAM_HEAD % b"text/event-stream")
            while not (self.head.startswith(b"HEAD ") or self.client.left or self.world.card.closed):
                news.clear()
                self.client.send(f"data: {json.dumps(eyes.picture())}\n\n".encode())
                time.sleep(EVENT_PAUSE)
                news.wait(EVENT_SECONDS)
        finally:
            eyes.readers.discard(news)

    def _lease(self, query, body):
        """The card for a command, until the last process that has this connection has closed it."""
        card, lease, over, wanted = self.world.card, self.world.lease, threading.Event(), parsed(body)
        command, wait, again = (member(wanted, key) for key in ("command", "wait", "again"))
        limit = wait if isinstance(wait, (int, float)) and 0 < wait < 1e9 else 0
        hold = card.acquire(lease, str(command)[:500], limit, False, self.client.on_leave, again is True)
        def end():
            """The hold is taken away: who runs the command ends it first."""
            with contextlib.suppress(Gone):
                self.client.send(json.dumps({"end": hold.revoked}).encode() + b"\n")
            over.wait(LEASE_SECONDS)
        hold.on_revoke = end
        try:
            if hold.revoked:                # nobody could be told until here
                raise Refused(503, f"the card was taken away: {hold.revoked}", "released", 1)
            self.client.send(STREAM_HEAD % b"application/x-ndjson")
            self.client.on_leave(over.set)
            over.wait()
        finally:
            card.release(hold)

    def _release(self, query, body):
        """Let go of a stuck hold: the one that id names (its number, or its job), else the oldest image's."""
        wanted = query_values(query, "id")
        found = [hold for hold in self.world.card.holds() if (
            wanted[0] in (str(hold.id), hold.job) if wanted else hold.engine.kind == IMAGE)]
        return {"released": [{"id": hold.id, "engine": hold.engine.name, "what": hold.what, "job": hold.job}
                             for hold in found[:1] if self._take_away(hold, "released by hand")]}

    def _take_away(self, hold, why):
        log.warning("%s: %s (%s)", why, hold.what, hold.job or "no job")
        return self.world.card.revoke(hold, why, lambda: hold.engine.give_up(hold.job))

    def _free(self, query, body):
        """Everything off the card, before all who wait; force=1: also what runs."""
        card, force = self.world.card, "1" in query_values(query, "force")
        def on_wait(leave):
            self.client.on_leave(leave)
            for hold in card.holds() if force else ():      # only now: nobody else is let in any more
                with contextlib.suppress(Refused):
                    self._take_away(hold, "freed by hand")
        nobody, limit = Engine(None), 0 if force else self.world.settings.busy_wait
        nobody.drain_limit = FORCE_SECONDS if force else 0
        card.release(card.acquire(nobody, "POST /stadi/free", limit, False, on_wait, True))
        return {"freed": True, "vram_used": self.world.eyes.vram.used()}

    def _load(self, query, body):
        """Make an engine ready, in its turn; it may idle from then on."""
        name = (query_values(query, "engine") or ["sd"])[0]
        if not (engine := self.world.engines.get(name)):
            raise Refused(404, f"there is no engine {name!r} behind this stadi", "not_found_error")
        limit = self.front.limits.get(engine.kind, self.world.settings.image_wait)
        hold = self.world.card.acquire(engine, "POST /stadi/load", limit, False, self.client.on_leave)
        hold.began = None               # no job: it tells nothing of how long they take
        self.world.card.release(hold)
        return {"loaded": name}

    def _watch(self, request, route, engine):
        """Looking may neither turn the card round nor keep anything there."""
        if engine.kind == LLM:
            if hold := self.world.card.watch(engine, f"{request.method} {route.path}"):
                try:
                    if engine.loaded(query_values(request.target.partition("?")[2], "model")):
                        return self._pass(request, route, engine, hold)
                finally:
                    self.world.card.release(hold)
            raise Refused(503, "llm is not loaded")
        if request.method in READS and (kept := engine.result(route.path.removeprefix("/sdcpp/v1/jobs/"))):
            return self._answer(request, 200, kept.decode("utf-8", "replace"))
        if not engine.serving:
            raise Refused(503, "sd is not loaded")
        return self._pass(request, route, engine)

    def _take(self, request, route, engine):
        """The body first: no client is seen to leave while its bytes lie unread. A long one may stream."""
        card, spool, joins = self.world.card, Spool(), route.path in engine.jobs
        try:
            for block in self.client.body(request):
                spool.add(block)
                if spool.size >= SPOOL_BYTES and card.has(engine, at_once=True):
                    break
            if request.body.done and (route.kind == STEER and card.has(engine)      # it steers what runs now
                                      or engine.spares(route.path, request, spool.whole())):
                return self._pass(request, route, engine, None, spool)
            hold = card.acquire(engine, f"{request.method} {route.path}", self.front.limits[engine.kind],
                                joins, self.client.on_leave)
            return self._held(request, route, hold, spool, joins)
        finally:
            spool.close()

    def _held(self, request, route, hold, spool, joins):
        """Relay under a hold, which ends with the answer, or with the job that the answer names."""
        card, engine, on_left = self.world.card, hold.engine, None
        if engine.kind == IMAGE:            # an asynchronous job is wanted whether or not its client stays
            on_left = (lambda: None) if joins else functools.partial(card.reconsider, hold)
        def late():
            with contextlib.suppress(Refused):                  # its end is no better: noted by the engine
                self._take_away(hold, LATE)
        exchange = Exchange(self.client, request, self.forwarded, hold, on_left)
        if ended := engine.job_bound and threading.Event():     # where no threads are left: unbounded, then
            start(lambda: ended.wait(engine.job_bound) or late())
        try:
            return self._pass(request, route, engine, hold, spool, exchange)
        finally:
            if ended:
                ended.set()
            try:
                if exchange.status:
                    hold.job = engine.job_of(exchange.status, exchange.copied)
            finally:
                if hold.job is None or hold.revoked:
                    card.release(hold)
                elif not start(follow, card, hold):     # no threads left: this one will do
                    follow(card, hold)

    def _pass(self, request, route, engine, hold=None, spool=None, exchange=None):
        """Carry out an exchange, over the kept connection where it fits. True if the client's may go on."""
        exchange, upstream = exchange or Exchange(self.client, request, self.forwarded, hold), self.upstream
        self.upstream = None
        if not (upstream and upstream.engine is engine and upstream.fits()):
            if upstream:
                upstream.close()
            upstream = Upstream(engine, self.client.stall)
        try:
            if exchange.run(upstream, spool or Spool()) and not engine.fresh and request.keep:
                upstream.idle_since, self.upstream = time.monotonic(), upstream
        finally:
            if self.upstream is not upstream:
                upstream.close()
            if exchange.status:
                self.world.eyes.count(self.front.name, self.route_kind, exchange.status)
        return request.keep and not self.world.card.closed

# ----- Commands ---------------------------------------------------------------------------------------------
# What a person at a terminal has beside the page: they ask a running stadi, as any client does. `run` lends
# the card to a command by one open request whose socket the command inherits: the kernel tells stadi when the
# last process that has it is gone, however it went, and whatever became of `run`.

ASKED = {"status": ("GET", "/status", ""), "free": ("POST", "/stadi/free", ""),
         "load": ("POST", "/stadi/load", "engine"), "release": ("POST", "/stadi/release", "id")}
AGAIN_SECONDS, TERMINATE_SECONDS = 0.1, 10.0    # between two tries for a lost lease; from TERM to KILL

def view(status):
    """The status in a human's words, line by line."""
    vram, moving, holds = status["vram"], status["handover"], (status["holder"] or {}).get("holds", ())
    yield f"stadi {status['version']}, up {status['uptime_s'] / 3600:.1f} h"
    if moving:
        yield (f"card      on its way to {moving['to'] or 'nobody'}: {moving['phase']} for"
               f" {moving['phase_s']:.1f}s ({moving['why']})")
    for hold in holds:
        yield f"card      {hold['engine']} for {hold['since_s']:.0f}s: {hold['what']} (id {hold['id']})"
    if not (moving or holds):
        left = status["idle_left_s"]
        yield "card      nobody asks for it" + (f"; freed in {left:.0f}s" if left is not None else "")
    if vram["used"] is not None:
        total = f" of {vram['total'] / GIB:.1f}" if vram["total"] else ""
        yield f"memory    {vram['used'] / GIB:.1f}{total} GiB used"
    for row in vram["in_the_way"]:
        yield f"in way    {row['mib']} MiB: {row['name']} (pid {row['pid']})"
    for row in status["waiting"]:
        limit = f" of {row['limit_s']:.0f}s" if row["limit_s"] else ""
        yield f"waiting   {row['engine']}: {row['what']}, {row['waited_s']:.0f}s{limit}"
    for row in status["handovers"][-5:]:
        phases = ", ".join(f"{phase} {row[f'{phase}_ms']}" for phase in PHASES)
        yield (f"{time.strftime('%H:%M:%S', time.localtime(row['at']))}  {row['from'] or 'nobody'} to"
               f" {row['to'] or 'nobody'}: {phases} ms {row['error'] or ''}")
    yield from (f"trouble   {name}: {engine['error']}" for name, engine in status["engines"].items()
                if engine["error"])

def show(lines):
    print("\n".join(re.sub(NOT_PRINTED, " ", line) for line in lines), flush=True)

def opened(settings, method, path, body=None):
    """The answer of a running stadi, still open. Raises Usage; Trouble, in its own words if it refuses."""
    at = settings.at or settings.listen or settings.listen_ollama or settings.listen_comfy
    if not at:
        raise Usage(f"{SETTINGS['at']}: no front is on; say where stadi is")
    at = Endpoint("127.0.0.1", at.port) if at.host in ("", "0.0.0.0", "::") else at
    connection = http.client.HTTPConnection(*at)
    try:
        connection.request(method, path, body and json.dumps(body))
        answer = connection.getresponse()
        if answer.status == 200:
            return answer
        error = member(parsed(answer.read(SMALL)), "error")
        raise Trouble(str(member(error, "message") or error or f"status {answer.status}"))
    except (OSError, http.client.HTTPException) as error:
        raise Trouble(f"no stadi answers at http://{at}: {error}; is it running? see -at") from None

def ask(settings):
    """The commands status, free, load and release. Raises Trouble, Usage."""
    method, path, key = ASKED[settings.command]
    for line in opened(settings, "GET", "/stadi/events") if settings.watch else ():
        if line.startswith(b"data: "):
            print(end="\x1b[H\x1b[2J")           # the terminal is cleared
            show(view(json.loads(line[6:])))
    pairs = [(key, word) for word in settings.rest] + [("force", 1)] * settings.force
    answer = parsed(opened(settings, method, f"{path}?{urllib.parse.urlencode(pairs)}").read())
    show(view(answer) if settings.command == "status" and not settings.json else [json.dumps(answer)])
    return 0

def lend(settings):
    """The command run. Returns its exit code, as a shell has it. Raises OSError, Trouble, Usage."""
    words, token, ending = settings.rest, token_for("run", os.getpid()), threading.Lock()
    if not words or not shutil.which(words[0]):
        raise Usage(f"run -- COMMAND ...: {' '.join(words[:1])!r} is no program that can be run")
    wanted = {"command": shlex.join(words)[:500], "wait": settings.wait}
    lease = opened(settings, "POST", "/stadi/lease", wanted)
    every = (), token, str(os.fstat(lease.fileno()).st_ino)     # one that has cleared its environment as well
    def send(number):
        for pid in kin(*every):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
    def end(why):
        with ending:
            print(f"stadi: ending the command: {why}", file=sys.stderr)
            until = time.monotonic() + TERMINATE_SECONDS
            send(signal.SIGTERM)
            send(signal.SIGCONT)                # a stopped one hears no TERM
            while kin(*every) and time.monotonic() < until:
                time.sleep(0.1)
            end_kin(*every)
    def keep(lease):
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, Trouble):
                for line in lease:
                    if why := member(parsed(line), "end"):
                        return end(why)
                # stadi has ended: the next one is asked, ahead of all
                lease = opened(settings, "POST", "/stadi/lease", {**wanted, "wait": 0, "again": True})
            time.sleep(AGAIN_SECONDS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):   # Ctrl-C reaches the command: it decides
        if signal.getsignal(number) != signal.SIG_IGN:              # nohup's stays, for the command as well
            signal.signal(number, lambda number, _: number == signal.SIGINT or send(number))
    command = subprocess.Popen(words, pass_fds=[lease.fileno()], env={**os.environ, TOKEN: token})
    start(keep, lease)
    if settings.max:
        start(lambda: (time.sleep(settings.max), end(f"it has had the card for {settings.max:g}s (-max)")))
    code = command.wait()
    with ending:                                # what is being ended is ended before
        return code if code >= 0 else 128 - code

# ----- main -------------------------------------------------------------------------------------------------
MODEL_FLAGS = ("-m --model --diffusion-model --high-noise-diffusion-model --llm --llm_vision --clip_l"
               " --clip_g --clip_vision --t5xxl --vae --tae --taesd --control-net").split()

def findings(settings, environ):
    """-check: (ok, warning or error; what was found, what to do). A warning may be mended by waiting."""
    log.disabled = True                                 # what an engine lacks is said here
    try:
        yield from sd_findings(settings) if settings.sd else ()
        world = build(settings, environ)
        yield from engine_findings(world.engines.values())
        meter = world.eyes.vram.meter
        reading = meter.read()
        yield ("ok", f"VRAM: {reading.used / GIB:.1f} GiB used, read by {meter.source}") if reading else (
            "warning", f"VRAM cannot be read here: {meter.error or 'give -vram-cmd if a command can tell'}")
        for server in listen(world):
            yield "ok", f"port {server.server_address[1]} is free for {server.front.name}"
    except Usage as error:
        yield "error", str(error)

def sd_findings(settings):
    """Of the child that is to be: (ok, warning or error; text). Raises Usage where it cannot be run."""
    words, wanted = settings.sd_args, str(settings.sd.port)
    values = dict(zip(words, words[1:]))
    for flag in filter(values.get, MODEL_FLAGS):
        there = os.path.isfile(path := os.path.abspath(values[flag]))
        yield "ok" if there else "error", f"-sd-args: {flag}: {'' if there else 'there is no file '}{path}"
    port = values.get("--listen-port", "1234")
    if port != wanted:
        yield "warning", f"-sd-args: it listens on {port}, -sd says {wanted}; write --listen-port {wanted}"
    if any(word.startswith("--params-backend") for word in words):
        yield "warning", "-sd-args: --params-backend disables --auto-fit (VAE tiling); leave it out"
    if inodes := listeners(settings.sd.port):
        left = orphans(settings.sd.port)
        yield ("warning", f"port {wanted} (-sd): left behind by stadi, the next start ends it") if left else (
            "error", f"port {wanted} (-sd) is held by {who_listens(inodes)}; end it, or take another port")
    yield "ok", f"sd-server: {runnable('sd-bin', settings.sd_bin)}"

def engine_findings(engines):
    """Whether they answer, and as what they should. What is wrong is logged as well, as always."""
    for engine in (each for each in engines if each.name != "sd"):      # a child: nothing is there yet
        at = f"{engine.title} at http://{engine.endpoint}"
        try:
            engine.probe()
            yield "ok", at
        except Trouble as error:
            yield "error" if isinstance(error, Misfit) else "warning", f"{at}: {error}"

def build(settings, environ):
    """The world: engines, card and eyes, wired. Raises Usage where it cannot work."""
    llama = settings.llm and Router(settings.llm, settings.llm_key, settings.busy_wait, settings.vram_wait)
    sd = settings.sd and Sd(settings.sd, [settings.sd_bin, *settings.sd_args], settings.sd_log_dir,
                            settings.idle, settings.load_wait, settings.render_wait)
    ollama = settings.ollama and Ollama(settings.ollama, settings.unload_timeout)
    comfy = settings.comfy and Comfy(settings.comfy, settings.comfy_keep, settings.job_timeout,
                                     lambda: vram.used())
    engines, eyes = {engine.name: engine for engine in (llama, sd, ollama, comfy) if engine}, Eyes()
    vram = Vram(find_meter(settings, environ, comfy and comfy.reading), settings.free_gib, settings.vram_wait)
    lease = Lease(None)
    card = Card([*engines.values(), lease], vram, tell=eyes.tell)
    eyes.card, eyes.vram, eyes.engines = card, vram, engines
    if settings.warm_model and ollama:
        card.warm = ollama, lambda hold: ollama.warm(card, hold, settings.warm_model)
    return types.SimpleNamespace(settings=settings, engines=engines, lease=lease, card=card, eyes=eyes,
                                 watcher=Watcher())

def listen(world):
    """The servers of all fronts that are on. Raises Usage where a port is taken."""
    settings, servers = world.settings, []
    limits = {LLM: settings.busy_wait, IMAGE: settings.image_wait}
    gates = tuple(f"{prefix}{path}" for prefix in ("", "/api") for path in ("/prompt", *settings.comfy_gate))
    comfy = passing("comfy", "|".join(map(re.escape, gates)))       # each of its routes exists twice
    for flag, endpoint, front in (
            ("listen", settings.listen, Front("llama/sd", table("llama", LLAMA_SD, True), True, limits)),
            ("listen-ollama", settings.ollama and settings.listen_ollama,
             Front("ollama", table("ollama", OLLAMA), False, {LLM: settings.llm_wait_timeout})),
            ("listen-comfy", settings.comfy and settings.listen_comfy,
             Front("comfy", table("comfy", comfy), False, limits, gates))):
        try:
            servers += [Server(endpoint, front, world)] if endpoint else []
        except OSError as error:
            held = listeners(endpoint.port) if error.errno == errno.EADDRINUSE else ()
            words = error.strerror.partition(" (")[0] + (f", by {who_listens(held)}; end it" if held else "")
            raise Usage(f"{SETTINGS[flag]}: {endpoint}: {words}") from None
    return servers

def serve(settings, environ):
    """Run until a signal. Returns the exit code. Raises Usage."""
    world = build(settings, environ)
    if sd := world.engines.get("sd"):
        end_orphans(settings.sd.port)
        for level, finding in sd_findings(settings):
            log.log(logging.DEBUG if level == "ok" else logging.WARNING, "%s", finding)
    servers = listen(world)
    # a signal may go to any thread, and a main thread in a lock never learns of it: that one writes here
    signals, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:       # nohup's
            signal.signal(number, lambda *_: None)
    for target in (world.card.run, world.watcher.run, world.eyes.sample):
        start(target)
    start(list, engine_findings(world.engines.values()))
    for server in servers:
        start(server.serve_forever)
        at = Endpoint(*server.server_address[:2])
        log.info("stadi %s answers on http://%s for %s; VRAM by %s; its page: http://%s/stadi", VERSION, at,
                 server.front.name, world.eyes.vram.meter.source, at)
    log.info("ending: %s", signal.Signals(signals.recv(1)[0]).name)
    start(lambda: signals.recv(1) and os._exit(0))      # a second signal: no grace; the guard ends sd-server
    world.card.close(Refused(503, "stadi is ending", "shutting_down", 5), settings.grace)
    if sd and sd.child and not sd.child.stop(1.5, 2.0):
        log.error("sd-server (pid %d) does not end", sd.child.pid)
    time.sleep(0.05)                        # who was refused by the end gets to read it
    return 0

def main(argv, environ):
    try:
        settings = read_settings(argv, environ)
        if settings.h or settings.version:
            print(usage() if settings.h else f"stadi {VERSION}", flush=True)
            return 0
        if settings.command:
            return lend(settings) if settings.command == "run" else ask(settings)
        complete(settings, environ)
        if settings.check:
            found = list(findings(settings, environ))
            print(*(f"{level:7} {text}" for level, text in found), sep="\n", flush=True)
            return int("error" in dict(found))
        handler, LogFormat.as_json = logging.StreamHandler(), settings.log_format == "json"
        handler.setFormatter(LogFormat())
        logging.basicConfig(handlers=[handler], level=settings.log_level.upper())
        logging.raiseExceptions = False         # a full disk must not end anything
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))
        return serve(settings, environ)
    except (Usage, Trouble, OSError) as error:
        print(f"stadi: {why_not(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 2 if isinstance(error, Usage) else 1
    except KeyboardInterrupt:
        return 130

if __name__ == "__main__":
    os._exit(main(sys.argv[1:], os.environ))    # threads that wait for clients hold nothing any more
