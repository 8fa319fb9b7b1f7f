#!/usr/bin/env python3
# This Source Code Form is subject to the terms of the Mozilla Public License, v. 2.0.
# If a copy of the MPL was not distributed with this file, You can obtain one at https://mozilla.org/MPL/2.0/.
"""stadi: a GPU slot broker. One card, several engines that cannot share it, one file that owns the card.

A language model (llama.cpp's router, or Ollama) and an image model (stable-diffusion.cpp's sd-server, or ComfyUI)
each believe that the card is their own; whichever loads second runs out of memory. stadi stands in front of all
of them. The way of a request:

    1. a Front accepts the connection, the strict reader of the Wire room takes the head (or answers 400);
    2. the Routes decide from method, path and query alone: take (needs the card), pass (touches no GPU),
       watch (only while that engine is loaded), own (stadi answers itself);
    3. who takes the card has its body read first, then waits in the Card's queue;
    4. the Card lets the holds in flight end, evicts the engines that are resident, waits until the VRAM has
       returned, makes the wanted engine ready (a hand-over, done by one thread, outside the lock), and grants;
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
    Front       servers and the handler: from a route's class to card, relay or answer
    main        settings, signals, wiring
"""
import bisect
import collections
import contextlib
import errno
import functools
import http.client
import http.server
import ipaddress
import itertools
import json
import logging
import os
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import urllib.parse
from typing import NamedTuple

VERSION = "0.1.0"
MIB, GIB = 1 << 20, 1 << 30
LLM, IMAGE = "llm", "image"

log = logging.getLogger("stadi")


# ----- Settings -----------------------------------------------------------------------------------------------

class Usage(Exception):
    """A setting that cannot be used; the text is one line that says what to write instead."""


class Endpoint(NamedTuple):
    """Where an engine listens, or where stadi does."""
    host: str
    port: int

    def __str__(self):
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self):
        return self.host == "localhost" or is_ip(self.host) and ipaddress.ip_address(self.host).is_loopback

def is_ip(text):
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"

def duration(text):
    """Seconds, from Go's notation."""
    if text != "0" and not re.fullmatch(f"(?:{DURATION})+", text, re.ASCII):
        raise ValueError("is no duration; write 5s, 5m, 1h30m, 500ms or 0")
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(DURATION, text, re.ASCII))

def listen_address(text):
    """An Endpoint to listen on, or None for off; an empty host is every address."""
    if text == "off":
        return None
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:]*)):(\d{1,5})", text, re.ASCII)
    host = found and (found[1] or found[2] or "")
    if not found or int(found[3]) > 65535 or host not in ("", "localhost") and not is_ip(host):
        raise ValueError("is no address to listen on; write 127.0.0.1:55558, :55558, [::1]:55558 or off")
    return Endpoint(host.replace("localhost", "127.0.0.1"), int(found[3]))

def engine_url(text):
    """An Endpoint of an engine, or None for off."""
    if text == "off":
        return None
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(text)
        if (parts.scheme, parts.username, parts.query, parts.fragment) == ("http", None, "", "") and parts.hostname:
            if parts.path in ("", "/"):
                return Endpoint(parts.hostname, parts.port or 80)
    raise ValueError("is no engine's address; write http://127.0.0.1:55555 (host and port, nothing behind) or off")

def gibibytes(text):
    if not re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        raise ValueError("is no size; write a number of GiB, such as 2 or 0.5")
    return int(float(text) * GIB)

def command_line(text):
    """Words of a command line: split at spaces, or as a shell does where quotes or backslashes stand in it."""
    try:
        return shlex.split(text) if set(text) & set("'\"\\") else text.split()
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {error}; close the quote") from None

def names(text):
    """Lower-case items of a comma-separated list."""
    return tuple(item.strip().lower() for item in text.split(",") if item.strip())

def paths(text):
    items = tuple(item.strip() for item in text.split(",") if item.strip())
    if not all(re.fullmatch(r"(/[A-Za-z0-9_.-]+)+", item) for item in items):
        raise ValueError("is no list of paths; write /sam/detect,/sam/prepare")
    return items

def gpu(text):
    if not re.fullmatch(r"|\d+|none|comfy|(?:[0-9A-Fa-f]+:)?[0-9A-Fa-f]+:[0-9A-Fa-f]+\.\d", text, re.ASCII):
        raise ValueError("is no card; write an index (0), a PCI address (0000:03:00.0), comfy or none")
    return text

def one_of(*choices):
    def choose(text):
        if text.lower() not in choices:
            raise ValueError(f"is none of {', '.join(choices)}")
        return text.lower()
    return choose


class Setting(NamedTuple):
    flag: str
    variable: str       # environment variable, "" where there is none
    default: str
    read: object        # text -> value; ValueError says what to write instead
    help: str

    def __str__(self):
        return f"-{self.flag}" + (f" ({self.variable})" if self.variable else "")


SETTINGS = {row[0]: Setting(*row) for row in (
    ("listen", "STADI_LISTEN", "127.0.0.1:55558", listen_address,
     "where stadi answers for the router and sd-server; :port is every address, [::1]:port works; off"),
    ("llm", "STADI_LLM", "http://127.0.0.1:55555", engine_url, "llama.cpp's router (llama-server without a model); off"),
    ("llm-key", "STADI_LLM_KEY", "", str, "the router's --api-key, for stadi's own calls; never shown or logged"),
    ("sd", "STADI_SD", "http://127.0.0.1:55557", engine_url, "where sd-server, stadi's child, comes up; off"),
    ("idle", "STADI_IDLE", "5m", duration, "stop sd-server this long after the last image request ended; 0 never"),
    ("busy-wait", "STADI_BUSY_WAIT", "2m", duration, "how long a chat waits for a render, then 503; 0 without end"),
    ("image-wait", "STADI_IMAGE_WAIT", "10m", duration,
     "how long an image request waits for chats, then 503 (behind other renders does not count); 0 without end"),
    ("render-wait", "STADI_RENDER_WAIT", "1h", duration,
     "bound on one render; then sd-server is stopped and the client gets 504; 0 none"),
    ("vram-wait", "STADI_VRAM_WAIT", "45s", duration,
     "bound on the card's memory coming back, and on the router's unloading; then a warning, and on"),
    ("load-wait", "STADI_LOAD_WAIT", "15m", duration, "bound on sd-server's port appearing"),
    ("free-gib", "", "2", gibibytes, "the card counts as free below this many GiB used"),
    ("gpu", "STADI_GPU", "", gpu,
     "which card to read: an index, a PCI address, comfy (ask ComfyUI), none; without it the card with the most VRAM"),
    ("vram-cmd", "STADI_VRAM_CMD", "", command_line,
     "a command that prints the MiB used, where neither amdgpu nor nvidia-smi can tell"),
    ("sd-bin", "STADI_SD_BIN", "sd-server", str, "the sd-server program; a bare name is looked up on PATH"),
    ("sd-args", "STADI_SD_ARGS", "", command_line, "sd-server's whole command line in one string; required while sd is on"),
    ("sd-log-dir", "STADI_SD_LOG_DIR", "", str,
     "where sd-server.log goes; without it $XDG_CACHE_HOME/stadi, else ~/.cache/stadi"),
    ("allow-host", "STADI_ALLOW_HOST", "", names, "more names that clients may call stadi by, comma-separated"),
    ("allow-origin", "STADI_ALLOW_ORIGIN", "", names, "web origins whose pages may use stadi, comma-separated"),
    ("stall", "STADI_STALL", "30s", duration, "a client that neither sends nor takes a byte for this long is cut off"),
    ("grace", "STADI_GRACE", "0", duration, "at the end, how long answers in flight may go on; new requests get 503"),
    ("keepalive", "STADI_KEEPALIVE", "75s", duration, "how long an idle client connection stays open"),
    ("listen-ollama", "LISTEN_OLLAMA", "off", listen_address,
     "where stadi answers in Ollama's place; :11434 with the word turnstile"),
    ("listen-comfy", "LISTEN_COMFY", "off", listen_address,
     "where stadi answers in ComfyUI's place; :8188 with the word turnstile"),
    ("ollama", "OLLAMA_URL", "http://127.0.0.1:11435", engine_url, "where Ollama itself listens; off"),
    ("comfy", "COMFY_URL", "http://127.0.0.1:8189", engine_url, "where ComfyUI itself listens; off"),
    ("unload-timeout", "UNLOAD_TIMEOUT", "60s", duration, "bound on Ollama's unloading; then a warning, and on"),
    ("job-timeout", "JOB_TIMEOUT", "15m", duration, "bound on one ComfyUI job, from its acceptance; then the card is let go"),
    ("llm-wait-timeout", "LLM_WAIT_TIMEOUT", "10m", duration,
     "how long a request to Ollama waits for the card, then 503; 0 without end"),
    ("warm-model", "WARM_MODEL", "", str, "a model that Ollama loads again whenever the card is let go and nobody waits"),
    ("comfy-keep", "COMFY_KEEP", "0", duration,
     "how long ComfyUI keeps its models for its next job; 0 frees the card after every job"),
    ("comfy-gate", "COMFY_GATE", "", paths, "more POST paths of ComfyUI that need the card (custom nodes), comma-separated"),
    ("log-level", "LOG_LEVEL", "info", one_of("debug", "info", "warning", "error"),
     "debug, info, warning or error; debug shows every step of the lock"),
    ("log-format", "LOG_FORMAT", "text", one_of("text", "json"), "text or json"),
)}
SWITCHES = {"check": "look at the world with these settings, say what to do, and exit, writing nothing",
            "version": "print the version and exit", "h": "print this help and exit"}
COMMANDS = {"turnstile": "stand in front of Ollama and ComfyUI on their usual ports"}
TURNSTILE = {"listen": "off", "listen-ollama": ":11434", "listen-comfy": ":8188"}     # its defaults

def read_flags(argv):
    """(command, {flag: text}, switches). Flags are Go's: -x v, -x=v, --x v, --x=v; the value is whatever comes next."""
    given, switches, command, words = {}, set(), "", collections.deque(argv)
    while words:
        word = words.popleft()
        found = re.fullmatch(r"--?([a-z][a-z-]*)(?:=(.*))?", word, re.DOTALL)
        flag = found and {"help": "h"}.get(found[1], found[1])
        if not found and word in COMMANDS and not command:
            command = word
        elif flag in SWITCHES:
            if found[2] is not None:
                raise Usage(f"-{flag} takes no value")
            switches.add(flag)
        elif flag not in SETTINGS:
            split = "sd-args" in given and " " not in given["sd-args"]
            raise Usage(f"{word!r} is no flag of stadi; -h lists them" + (
                "; put all of -sd-args in quotes" if split else ""))
        elif found[2] is None and not words:
            raise Usage(f"{SETTINGS[flag]} needs a value")
        else:
            given[flag] = found[2] if found[2] is not None else words.popleft()
    return command, given, switches

def read_settings(argv, environ):
    """All settings as a namespace (busy_wait for -busy-wait, and so on), from flags, then environment, then default.
    Raises Usage."""
    command, given, switches = read_flags(argv)
    values = types.SimpleNamespace(command=command, **{name: name in switches for name in SWITCHES})
    for setting in SETTINGS.values():
        variable = "" if command == "turnstile" and setting.flag == "listen" else setting.variable
        default = TURNSTILE.get(setting.flag, setting.default) if command == "turnstile" else setting.default
        text = given.get(setting.flag) or environ.get(variable) or default
        try:
            setattr(values, setting.flag.replace("-", "_"), setting.read(text))
        except ValueError as error:
            raise Usage(f"{setting}: {text!r} {error}") from None
    return values

def complete(values, environ):
    """Fill in what depends on other settings, and refuse combinations that cannot work. Raises Usage."""
    values.llm, values.sd = (values.llm, values.sd) if values.listen else (None, None)
    values.ollama = values.ollama if values.listen_ollama else None
    values.comfy = values.comfy if values.listen_comfy else None
    if not (values.llm or values.sd or values.ollama or values.comfy):
        raise Usage(f"{SETTINGS['listen']}: nothing is on; give -listen, -listen-ollama or -listen-comfy an address")
    if values.sd and not values.sd_args:
        raise Usage(f"{SETTINGS['sd-args']}: missing; give sd-server's whole command line, such as"
                    f" -sd-args '-m /models/sd.safetensors --listen-port {values.sd.port}', or -sd off")
    if values.sd and is_ip(values.sd.host) and not values.sd.loopback and not _own_address(values.sd.host):
        raise Usage(f"{SETTINGS['sd']}: sd-server is started on this machine; write http://127.0.0.1:{values.sd.port}")
    if values.gpu == "comfy" and not values.comfy:
        raise Usage(f"{SETTINGS['gpu']}: comfy asks ComfyUI, which is not on; give -listen-comfy an address")
    used = {}
    for flag in ("listen", "listen-ollama", "listen-comfy", "llm", "sd", "ollama", "comfy"):
        endpoint = getattr(values, flag.replace("-", "_"))
        local = endpoint and endpoint.port and (endpoint.host == "" or endpoint.loopback)
        if local and endpoint.port in used:
            raise Usage(f"{SETTINGS[flag]}: port {endpoint.port} is that of {SETTINGS[used[endpoint.port]]} already; give"
                        " one of them another" + (" (move Ollama itself with OLLAMA_HOST=127.0.0.1:11435)"
                                                  if flag == "ollama" else ""))
        used.update({endpoint.port: flag} if local else {})
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    values.sd_log_dir = os.path.abspath(values.sd_log_dir or os.path.join(cache, "stadi"))
    return values

def _own_address(host):
    """Whether this machine has the address: only then can something listen on it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return True
    return False

def usage():
    """The text of -h."""
    lines = ["usage: stadi.py [turnstile] [flags]     flags first, then the environment, then the default", ""]
    lines += [f"  {name}\n        {text}" for name, text in COMMANDS.items()]
    for flag, variable, default, _, text in SETTINGS.values():
        lines.append(f"  -{flag} {default}".rstrip() + (f"   [{variable}]" if variable else "") + f"\n        {text}")
    return "\n".join(lines + [f"  -{name}\n        {text}" for name, text in SWITCHES.items()])


# ----- VRAM ---------------------------------------------------------------------------------------------------

STEADY_SECONDS, STEADY_BYTES = 2.0, 64 * MIB    # the driver frees in steps; a level that lasts this long is the level
FLOOR_BYTES = 256 * MIB                         # what contexts of a desktop vary by
NUDGE_SECONDS = 1.5
BLIND_SECONDS = 5.0                             # no reading for this long: the card can't be seen, go on


class Reading(NamedTuple):
    used: int                   # bytes
    total: int | None           # bytes, where the source knows


class Meter:
    """Reads the VRAM in use. A read that hangs (nvidia-smi, with a wedged driver) costs its thread, never the caller."""

    def __init__(self, source, read, every=0.05):
        self.source, self.every = source, every      # every: seconds between two readings of one wait
        self.last, self.error, self._fresh = None, "", None
        self._read, self._lock, self._thread = read, threading.Lock(), None

    def read(self, seconds=BLIND_SECONDS):
        """A fresh Reading, or None after at most this many seconds; then .error says why."""
        if self._read is None:
            return None
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._fresh = None
                self._thread = threading.Thread(target=self._attempt, name="vram", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:                 # no threads left
                    self._thread = None
                    return None
            thread = self._thread
        thread.join(seconds)
        if thread.is_alive():
            self.error = f"{self.source} does not answer"
            return None
        return self._fresh

    def _attempt(self):
        try:
            self._fresh = self.last = self._read()
            self.error = ""
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            self.error = f"{self.source}: {error or type(error).__name__}"


def _printed(command):
    """What a command prints, as lines; bounded. Raises ValueError with its own last words when it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BLIND_SECONDS)
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-200:] or "and no word"
        raise ValueError(f"{command[0]} ended with exit code {done.returncode}: {words}")
    return done.stdout.strip().splitlines()

def _vram_cmd(command):
    def read():
        printed = (_printed(command) or [""])[0].strip()
        if not re.fullmatch(r"\d+(\.\d+)?", printed, re.ASCII):
            raise ValueError(f"printed {printed[:80]!r}, not a number of MiB (a pipe needs sh -c '...')")
        return Reading(int(float(printed) * MIB), None)
    return read

def _amdgpu(folder):
    def number(name):
        with open(os.path.join(folder, name), encoding="ascii") as file:
            return int(file.read())
    return lambda: Reading(number("mem_info_vram_used"), number("mem_info_vram_total"))

NVIDIA = ["nvidia-smi", "--query-gpu=index,pci.bus_id,memory.used,memory.total", "--format=csv,noheader,nounits"]

def _nvidia_rows():
    for line in _printed(NVIDIA):
        index, address, used, total = (part.strip() for part in line.split(","))
        yield index, address, Reading(int(used) * MIB, int(total) * MIB)

def _nvidia(address):
    return lambda: next(reading for _, bus, reading in [*_nvidia_rows(), ("", address, None)] if bus == address)

def cards(environ):
    """Every card that can be read: (source, PCI address, total bytes, index, read, seconds between readings)."""
    root, found = environ.get("STADI_DRM_ROOT") or "/sys/class/drm", []
    folders = [name for name in os.listdir(root) if re.fullmatch(r"card\d+", name)] if os.path.isdir(root) else []
    for folder in sorted(folders, key=lambda name: int(name[4:])):
        device = os.path.join(root, folder, "device")
        with contextlib.suppress(OSError, ValueError):
            read, address = _amdgpu(device), os.path.basename(os.path.realpath(device))
            source = f"amdgpu's {folder}/device/mem_info_vram_used"
            found.append((source, address, read().total, str(len(found)), read, 0.05))
    if shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            for index, address, reading in _nvidia_rows():
                found.append((f"nvidia-smi {index}", address, reading.total, index, _nvidia(address), 0.25))
    return found

def find_meter(settings, environ, comfy=None):
    """The Meter of the card that the settings name; one with source "none" where nothing can be read. Raises Usage.
    comfy: ComfyUI's reading, or None; it counts where the card may be in another machine."""
    if settings.vram_cmd:
        if not shutil.which(settings.vram_cmd[0]):
            raise Usage(f"{SETTINGS['vram-cmd']}: {settings.vram_cmd[0]!r} is not there, or cannot be executed")
        return Meter("-vram-cmd", _vram_cmd(settings.vram_cmd), 0.25)
    if settings.gpu in ("none", "comfy"):
        return Meter("ComfyUI", comfy, 0.25) if settings.gpu == "comfy" else Meter("none", None)
    here = settings.sd or any(url and url.loopback for url in (settings.llm, settings.ollama, settings.comfy))
    found = cards(environ) if here else []      # the container host's own GPU is not the card
    if settings.gpu:
        # a PCI address counts without its domain, which nvidia-smi writes with eight digits and sysfs with four
        chosen = [card for card in found if settings.gpu == card[3] or ":" in settings.gpu and
                  settings.gpu.lower().split(":")[-2:] == card[1].lower().split(":")[-2:]]
        if not chosen:
            there = "; ".join(f"{card[3]} is {card[0]} at {card[1]}" for card in found) or "no card can be read here"
            raise Usage(f"{SETTINGS['gpu']}: no card {settings.gpu!r}; {there}; leave -gpu out, or -gpu none")
        found = chosen
    if not found:
        return Meter("ComfyUI", comfy, 0.25) if comfy else Meter("none", None)
    source, _, _, _, read, every = max(found, key=lambda card: card[2])
    return Meter(source, read, every)


class Settling:
    """Decides, reading by reading, whether the card has been given back. Pure: time comes in as an argument."""

    def __init__(self, before, floor, free_below):
        self.before, self.floor, self.free_below = before, floor, free_below     # bytes; before and floor may be None
        self.lowest = self._level = self._since = None

    def back(self, now, used):
        """Whether this reading (bytes, at now seconds) completes the proof."""
        self.lowest = used if self.lowest is None else min(self.lowest, used)
        if self._level is None or abs(used - self._level) > STEADY_BYTES:
            self._level, self._since = used, now
        if used < self.free_below:
            return True
        fallen = self.floor is None and self.before is not None and used < self.before - STEADY_BYTES
        return now - self._since >= STEADY_SECONDS and (self.is_level(used) or fallen)

    def is_level(self, used):
        """Whether this is what a free card uses, as far as is known."""
        return used < self.free_below or self.floor is not None and used <= self.floor + FLOOR_BYTES


class Vram:
    """The card's memory: its meter, its floor, and the wait for its return. Used by the hand-over's thread."""

    def __init__(self, meter, free_below, wait, clock=time.monotonic, sleep=time.sleep):
        self.meter, self.free_below, self.bound = meter, free_below, wait
        self.floor = None       # bytes: the lowest level seen after a verified eviction, while nothing was resident
        self._clock, self._sleep = clock, sleep

    def used(self):
        reading = self.meter.read()
        return reading and reading.used

    def wait_back(self, before, verified, nudge, cut):
        """Wait until what was evicted has left the card; "" or a warning that says how much is still used.

        before: bytes used when the eviction began. nudge() is called again and again meanwhile. cut(): nobody needs
        the card back any more.
        """
        start = seen = nudged = self._clock()
        settling = Settling(before, self.floor, self.free_below)
        if before is not None and settling.is_level(before) or self.meter.source == "none":
            return ""
        while True:
            reading, now = self.meter.read(), self._clock()
            if now - nudged >= NUDGE_SECONDS:
                nudged = now
                nudge()
            if reading:
                seen = now
                if settling.back(now, reading.used):
                    if verified:
                        self.floor = min(settling.lowest, settling.lowest if self.floor is None else self.floor)
                    return ""
            elif now - seen >= BLIND_SECONDS:
                return f"VRAM cannot be read ({self.meter.error}): went on without"
            if cut():
                return "the wait for the VRAM was cut short: the next job is the same engine's"
            if now - start >= self.bound:
                if verified and settling.lowest is not None:
                    self.floor = settling.lowest
                used = f"{reading.used / GIB:.1f} GiB still used" if reading else self.meter.error
                return f"VRAM did not return within {self.bound:g}s (-vram-wait): {used}; went on"
            self._sleep(self.meter.every)


# ----- Card ---------------------------------------------------------------------------------------------------
#
# One lock guards every field of the Card. Two kinds of thread wait on it: requests, each on the Condition of its own
# Waiter (`turn`), and the mover, on `work`. Whoever changes a field calls _advance(), which grants what can be granted
# and wakes the mover if a hand-over is due; so no change can be forgotten. Decisions are made under the lock, engines
# are called outside of it, by the mover alone.

class Refused(Exception):
    """An answer of stadi's own instead of the engine's. everyone: all that wait are told, not only this engine's."""

    def __init__(self, status, message, kind="unavailable_error", retry_after=None, everyone=False):
        super().__init__(message)
        self.status, self.kind, self.retry_after, self.everyone = status, kind, retry_after, everyone


class Gone(Exception):
    """The client left; nobody is there to be answered."""


class GivenUp(Exception):
    """A hand-over that nobody wants any more, ended on purpose."""


class Eviction(NamedTuple):
    freed: bool                 # something was really asked to let go
    verified: bool              # and it was seen to have done so
    note: str = ""
    before: int | None = None   # bytes used when it began, where that was before the hand-over


class Hold:
    """One right to use the card. Ends once: by release(), or by revoke()."""

    def __init__(self, number, engine, what, since, began):
        self.id, self.engine, self.what, self.since, self.began = number, engine, what, since, began
        self.job = None                     # the asynchronous job that keeps it after the answer
        self.unwanted = False               # nobody waits for its work: it may be ended for the next
        self.revoked = ""                   # why it was taken away
        self.over = threading.Event()       # set when it was taken away: its follower stops
        self.on_revoke = lambda: None       # ends the work; called outside the lock


class Waiter:
    """A request in the queue. `turn` is notified when hold or error is set, and when its limit may count anew."""

    def __init__(self, lock, number, engine, what, arrived, limit=0, joins=False, blocked=0.0):
        self.id, self.engine, self.what, self.arrived, self.limit = number, engine, what, arrived, limit
        self.joins, self.blocked = joins, blocked   # blocked: the Card's blocked seconds when it came
        self.turn, self.hold, self.error = threading.Condition(lock), None, None


class Handover:
    """The card on its way to `to` (an engine, or None: to nobody); phases timed in milliseconds."""

    def __init__(self, to, why, requester, evict, began, own=False):
        self.to, self.why, self.requester, self.evict, self.began = to, why, requester, evict, began
        self.own = own                              # of stadi's own accord, for an idle card: evicts nobody
        self.running = False                        # False: holds are still in the way
        self.cancelled = threading.Event()          # set when nobody wants it any more
        self.phase, self.phase_since = "drain", began
        self.ms = dict.fromkeys(("drain", "evict", "vram", "start"), 0)
        self.notes, self.gone, self.moved = [], [], False   # gone: names of what was evicted; moved: something changed
        self.asked = None                           # the engine that works on something stadi holds nothing for
        self.before = self.after = None             # bytes


def choose(waiters, now, job_seconds):
    """Who is next. waiters are in order of arrival; job_seconds(engine) is a job's expected time, or None.

    (a) LLM requests that would reach their limit before another image job could end, never past an image job that
    came before them; (b) image jobs; (c) LLM requests. Oldest first in each.
    """
    image = next((waiter for waiter in waiters if waiter.engine.kind == IMAGE), None)
    if image is None:
        return waiters[0] if waiters else None
    expected = job_seconds(image.engine)
    for waiter in waiters[:waiters.index(image)]:
        if waiter.limit and (expected is None or waiter.arrived + waiter.limit < now + 2 * expected):
            return waiter
    return image


class Card:
    """The one GPU, and who may use it. engines and vram as in their rooms; tell(event, **fields) hears of every
    transition, under the lock."""

    def __init__(self, engines, vram, clock=time.monotonic, tell=lambda event, **fields: None):
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)    # the mover's: a hand-over may be due
        self._engines, self._vram, self._clock, self._tell = tuple(engines), vram, clock, tell
        self._holds = {}                                # id -> Hold; all of one engine
        self._waiters = []                              # in order of arrival
        self._owner = self._handover = self.closed = None      # owner: made ready last; None: nobody, or unknown
        self._numbers, self._idle_since = itertools.count(1), clock()
        self._blocked_total, self._blocked_since = 0.0, None    # seconds in which LLM holds stood in the way
        self._seconds = collections.defaultdict(lambda: collections.deque(maxlen=50))   # engine -> image jobs
        self._residents, self._ledger = {}, collections.deque(maxlen=50)    # engine's name -> its last answer
        self.warm = None                                # (engine, work(hold)): what an idle card is used for

    # -- requests --

    def acquire(self, engine, what, limit, joins=False, on_wait=lambda leave: None):
        """Wait for a hold. limit: seconds (rule 4), 0 for none. joins: may queue inside the engine beside its other
        jobs. on_wait(leave) is told how to leave the queue. Raises Refused, or Gone."""
        with self._lock:
            if self.closed:
                raise self.closed
            now = self._clock()
            waiter = Waiter(self._lock, next(self._numbers), engine, what, now, limit, joins, self._blocked(now))
            self._waiters.append(waiter)
            self._advance()
        if not waiter.hold:
            on_wait(lambda: self._leave(waiter))
            self._wait(waiter)
        if waiter.error:
            raise waiter.error
        return waiter.hold

    def _wait(self, waiter):
        with self._lock:
            while not (waiter.hold or waiter.error):
                left = self._left(waiter, self._clock())
                if left is not None and left <= 0:
                    message = f"{waiter.what} waited {waiter.limit:g}s for the card; {self._reason()}"
                    self._drop(waiter, Refused(503, message, "busy", self._retry_after(waiter.engine)))
                else:
                    waiter.turn.wait(left)

    def watch(self, engine, what):
        """A hold for a look at an LLM engine, only while it has the card or nobody does, else None; never waits."""
        with self._lock:
            if self.closed or self._waiters or self._handover or self._owner not in (engine, None):
                return None
            return self._grant(Waiter(self._lock, next(self._numbers), engine, what, self._clock()))

    def free_for(self, engine):
        """Whether a request for engine that came now would have the card (almost) at once."""
        with self._lock:
            return self._owner is engine and not (self._waiters or self._handover) and (
                not self._holds or self._can_share(engine, joins=False))

    def has(self, engine):
        """Whether engine has the card now, by its holds or as the last that was made ready."""
        with self._lock:
            return self._owner is engine and not (self._handover and self._handover.running)

    def release(self, hold):
        """End a hold; one that was revoked has ended already."""
        with self._lock:
            if self._holds.pop(hold.id, None):
                self._ended(hold)
                self._advance()

    def revoke(self, hold, why):
        """Take a hold away from its owner, who is told by `over` and on_revoke. True if it was still there."""
        with self._lock:
            if not self._holds.pop(hold.id, None):
                return False
            hold.revoked = why
            self._ended(hold)
        hold.over.set()
        hold.on_revoke()
        with self._lock:
            self._advance()
        return True

    def reconsider(self, hold):
        """The client of this hold left, and the work goes on: it may be ended for the next, if its engine can."""
        with self._lock:
            hold.unwanted = hold.engine.stoppable
            self._advance()

    def close(self, error, grace=0):
        """Refuse everyone from now on, those who wait included; return when no hold is left, or after grace seconds."""
        with self._lock:
            self.closed, until = error, self._clock() + grace
            while self._waiters:
                self._drop(self._waiters[0], error)
            while self._holds and (left := until - self._clock()) > 0:
                self._work.wait(left)

    def _leave(self, waiter):
        with self._lock:
            if waiter in self._waiters:
                self._drop(waiter, Gone())

    def _drop(self, waiter, error):
        self._waiters.remove(waiter)
        waiter.error = error
        waiter.turn.notify()
        if not self._waiters and not self._holds:
            self._idle_since = self._clock()
        self._advance()

    # -- limits --

    def _blocked(self, now):
        return self._blocked_total + (now - self._blocked_since if self._blocked_since is not None else 0)

    def _count_blocked(self):
        """Keep the clock of image requests: it runs while LLM holds, or their drain, stand in the way."""
        in_way = [hold.engine for hold in self._holds.values()]
        if self._handover and self._handover.asked:
            in_way.append(self._handover.asked)
        blocked, now = any(engine.kind == LLM for engine in in_way), self._clock()
        if blocked != (self._blocked_since is not None):
            self._blocked_total, self._blocked_since = self._blocked(now), now if blocked else None
            self._recount()

    def _recount(self):
        """Which limits count has changed: let every waiter look again."""
        for waiter in self._waiters:
            waiter.turn.notify()

    def _left(self, waiter, now):
        """Seconds until this waiter's limit; None while no limit counts."""
        moving = self._handover
        if not waiter.limit or moving and moving.running and moving.to is waiter.engine and moving.phase != "drain":
            return None
        if waiter.engine.kind == LLM:
            return waiter.arrived + waiter.limit - now
        return None if self._blocked_since is None else waiter.limit - (self._blocked(now) - waiter.blocked)

    def _reason(self):
        """Who has the card, since when, and why, in words."""
        now, moving = self._clock(), self._handover
        for hold in self._holds.values():
            doing = f"job {hold.job}" if hold.job else hold.what
            return f"{hold.engine.name} has had it for {now - hold.since:.0f}s ({doing}){hold.engine.hint}"
        if moving and moving.asked:
            return (f"{moving.asked.name} has been busy for {now - moving.phase_since:.0f}s with work that did not come"
                    f" through stadi, or outlived its connection{moving.asked.hint}")
        if moving and moving.running:
            return (f"it is on its way to {moving.to.name if moving.to else 'nobody'}, in the phase {moving.phase} "
                    f"for {now - moving.phase_since:.0f}s ({moving.why})")
        return "others were before it"

    def _retry_after(self, engine):
        """Seconds after which to ask again: what this engine's hand-over and the holder's job usually take."""
        moves = [sum(row[f"{phase}_ms"] for phase in ("evict", "vram", "start")) / 1000
                 for row in self._ledger if row["to"] == engine.name and not row["error"]]
        holder = next((hold.engine for hold in self._holds.values()), None)
        return max(1, min(600, round((median(moves) or 5) + (self._job_seconds(holder) or 5 if holder else 0))))

    # -- decisions, all under the lock --

    def _job_seconds(self, engine):
        return median(self._seconds.get(engine, ()))

    def _can_share(self, engine, joins):
        """Whether a hold can be added without a hand-over. An image job alone has the other engines asked first."""
        if self._owner is not engine or self._handover and self._handover.running:
            return False
        if not self._holds:
            return engine.kind == LLM
        return (engine.kind == LLM or joins) and all(hold.engine is engine for hold in self._holds.values())

    def _grant(self, waiter, began=None):
        now = self._clock()
        if any(hold.engine is not waiter.engine for hold in self._holds.values()):
            raise AssertionError("the promise: two engines would hold the card")
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        hold = waiter.hold = Hold(waiter.id, waiter.engine, waiter.what, now, now if began is None else began)
        self._holds[hold.id] = hold
        self._count_blocked()
        self._tell("grant", hold=hold.id, engine=hold.engine.name, kind=hold.engine.kind, what=hold.what,
                   waited=now - waiter.arrived)
        waiter.turn.notify()
        return hold

    def _ended(self, hold):
        now = self._clock()
        if hold.engine.kind == IMAGE:
            self._seconds[hold.engine].append(now - hold.began)
        if not self._holds:
            self._idle_since = now
        self._count_blocked()
        self._tell("release", hold=hold.id, engine=hold.engine.name, what=hold.what, held=now - hold.since,
                   revoked=hold.revoked)

    def _next(self):
        return choose(self._waiters, self._clock(), self._job_seconds)

    def _advance(self):
        """Grant whatever can be granted now; settle what the mover has to do. Called after every change."""
        moving = self._handover
        if moving and moving.running and not self.closed:
            self._still_wanted(moving)
        elif not self.closed:
            while (waiter := self._next()) and self._can_share(waiter.engine, waiter.joins):
                self._grant(waiter)
            if waiter is None:
                self._handover = moving if moving and moving.own else None
            elif not moving or moving.requester is not waiter:
                began = moving.began if moving and moving.to is waiter.engine else self._clock()
                evict = [engine for engine in self._engines if engine is not waiter.engine]
                self._handover = Handover(waiter.engine, waiter.what, waiter, evict, began)
        if self._handover or self.closed or self._idle_left() is not None:
            self._work.notify_all()

    def _still_wanted(self, moving):
        """Rule 5: a hand-over outlives its requester unless the next in line is for another engine."""
        waiter, requester = self._next(), moving.requester
        if not moving.to and moving.phase == "vram" and waiter and not waiter.engine.stoppable and (
                [waiter.engine] == moving.evict):
            moving.cancelled.set()          # its process lives, its memory is its own: nothing to wait for
        if not requester or requester in self._waiters or requester.hold:
            return
        if waiter and waiter.engine is moving.to:
            moving.requester = waiter
        elif waiter or moving.asked:
            moving.cancelled.set()

    def _idle_left(self):
        """Seconds until the owner's time is up; None where no clock runs."""
        owner = self._owner
        if not owner or owner.idle_after is None or self._holds or self._waiters or self._handover or self.closed:
            return None
        return self._idle_since + owner.idle_after - self._clock()

    # -- the mover --

    def run(self):
        """The mover's life: every hand-over, one after the other. Never returns."""
        while True:
            with self._lock:
                while not (due := self._due()):
                    self._work.wait(self._idle_left())
            self.move(*due)

    def _due(self):
        """What the mover has to do now: (hand-over, holds to revoke first), or None."""
        moving, left = self._handover, self._idle_left()
        if self.closed:
            return None
        if left is not None and left <= 0:
            moving = self._handover = Handover(None, "idle", None, [self._owner], self._clock())
        in_way = list(self._holds.values())
        if not moving or not all(hold.unwanted and hold.engine is not moving.to for hold in in_way):
            return None
        moving.running = True
        if self._owner is moving.to:        # it waited for its own engine's jobs: no drain
            moving.began = moving.phase_since = self._clock()
        for hold in in_way:
            del self._holds[hold.id]
            hold.revoked = "nobody waits for it any more"
            self._ended(hold)
        return moving, in_way

    def move(self, moving, revoked=()):
        """Carry out one hand-over, and tell everybody how it ended."""
        error = None
        for hold in revoked:
            hold.over.set()
            hold.on_revoke()
        try:
            self._vacate(moving)
            if moving.to:
                self._phase(moving, "start")
                if moving.cancelled.is_set():
                    raise GivenUp
                moving.moved |= bool(moving.to.ready(moving.cancelled))
        except (Refused, GivenUp) as failure:
            error = failure
        except Exception as failure:        # a fault of stadi's own must not cost the card
            log.exception("hand-over failed")
            error = Refused(500, f"hand-over to {moving.to.name if moving.to else 'nobody'} failed: {failure!r}")
        self._finish(moving, error)

    def _vacate(self, moving):
        """Evict whoever is resident, and wait for the VRAM."""
        self._phase(moving, "drain")
        others = [engine for engine in self._engines if engine is not moving.to]
        self._residents.update({engine.name: engine.resident() for engine in others})
        residents = [engine for engine in others if self._residents[engine.name] is not False]
        alone = all(engine in moving.evict for engine in residents)
        if moving.own and not alone:
            raise GivenUp                               # warm never evicts
        residents = [engine for engine in residents if engine in moving.evict]
        for engine in residents:
            self._drain(moving, engine)
        if not residents:
            return
        self._phase(moving, "evict")
        moving.before = self._vram.used()
        for engine in residents:
            eviction = engine.evict()
            self._residents[engine.name] = False if eviction.verified else None
            moving.gone += [engine.name] if eviction.freed else []
            moving.before = moving.before if eviction.before is None else eviction.before
            moving.notes += [eviction.note] if eviction.note else []
            alone = alone and eviction.verified
        moving.moved = bool(moving.gone)
        if moving.moved and not (moving.to and moving.to.resident()):
            self._phase(moving, "vram")
            warning = self._vram.wait_back(moving.before, alone, lambda: [engine.nudge() for engine in residents],
                                           moving.cancelled.is_set)
            moving.notes += [warning] if warning else []
            if warning and not moving.cancelled.is_set():
                log.warning("%s", warning)
            for engine in residents if not warning else ():
                engine.evicted()
        moving.after = self._vram.used()

    def _drain(self, moving, engine):
        """Rule 6: work that outlives its connection, or bypasses stadi, is known only to the engine."""
        end, pause = engine.busy_limit and self._clock() + engine.busy_limit, 0.05
        while engine.busy():
            with self._lock:
                moving.asked = engine
                self._count_blocked()
                self._still_wanted(moving)
            if moving.cancelled.is_set():
                raise GivenUp
            if end and self._clock() >= end:
                moving.notes.append(f"{engine.name} was still busy after {engine.busy_limit:g}s; evicted anyway")
                return log.warning("%s", moving.notes[-1])
            moving.cancelled.wait(pause)
            pause = min(0.5, pause * 2)

    def _timed(self, moving, phase):
        now = self._clock()
        moving.ms[moving.phase] += round((now - moving.phase_since) * 1000)
        moving.phase, moving.phase_since, moving.asked = phase, now, None

    def _phase(self, moving, phase):
        with self._lock:
            self._timed(moving, phase)
            if phase == "evict" and self._owner in moving.evict:
                self._owner = None          # from here on it may be gone
            self._count_blocked()
            self._recount()
            self._still_wanted(moving)
        self._tell("phase", to=moving.to.name if moving.to else "nobody", phase=phase, why=moving.why)

    def _finish(self, moving, error):
        with self._lock:
            before = self._owner
            self._timed(moving, "done")
            self._handover = None
            if error is None:
                self._owner = moving.to
                if moving.to:
                    self._residents[moving.to.name] = None      # it may load at any moment now
            if not self._holds and not self._waiters:
                self._idle_since = self._clock()
            if moving.moved or isinstance(error, Refused) or moving.to and moving.to is not before:
                self._record(moving, error)
            if isinstance(error, Refused):
                for waiter in [w for w in self._waiters if error.everyone or w.engine is moving.to]:
                    self._drop(waiter, error)
            elif error is None and moving.to:
                waiter = moving.requester if moving.requester in self._waiters else self._next()
                if waiter and waiter.engine is moving.to:
                    self._grant(waiter, moving.began)
            self._count_blocked()
            self._recount()
            self._advance()
            if self.warm and not (self._waiters or self._holds or self._handover or self.closed):
                self._warm_up(moving, error)

    def _warm_up(self, moving, error):
        """Rule 11: what an idle card is used for is a hold as well, of work that nobody waits for."""
        engine, work = self.warm
        if moving.own and error is None:
            hold = self._grant(Waiter(self._lock, next(self._numbers), engine, moving.why, self._clock()))
            hold.unwanted = True
            threading.Thread(target=work, args=(hold,), name="warm", daemon=True).start()
        elif moving.to is None:
            self._handover = Handover(engine, "warm", None, [], self._clock(), own=True)
            self._work.notify_all()

    def _record(self, moving, error):
        text = "given up" if isinstance(error, GivenUp) else str(error) if error else None
        row = {"at": time.time(), "from": ",".join(moving.gone) or None, "to": moving.to.name if moving.to else None,
               "why": moving.why, **{f"{phase}_ms": ms for phase, ms in moving.ms.items()},
               "vram_before": moving.before, "vram_after": moving.after, "error": text, "notes": moving.notes}
        self._ledger.append(row)
        self._tell("handover", **row)

    # -- looking --

    def holds(self):
        """The holds, oldest first."""
        with self._lock:
            return list(self._holds.values())

    def snapshot(self):
        """Everything that the status shows, at one moment."""
        with self._lock:
            now, moving, left = self._clock(), self._handover, self._idle_left()
            holds = [{"id": hold.id, "engine": hold.engine.name, "kind": hold.engine.kind, "what": hold.what,
                      "since_s": now - hold.since, "job": hold.job, "unwanted": hold.unwanted}
                     for hold in self._holds.values()]
            to, running = (moving.to, moving.running) if moving else (None, False)
            shown = holds[0]["kind"] if holds else to.kind if to and running else "idle"
            if moving and not running and to is self._owner:
                moving = None                           # it only queues behind its own engine's jobs
            return {
                "state": shown,
                "holder": {**{key: holds[0][key] for key in ("engine", "kind", "since_s")}, "holds": holds}
                if holds else None,
                "in_flight": {kind: sum(hold["kind"] == kind for hold in holds) for kind in (LLM, IMAGE)},
                "waiting": [{"kind": waiter.engine.kind, "engine": waiter.engine.name, "what": waiter.what,
                             "waited_s": now - waiter.arrived, "limit_s": waiter.limit or None}
                            for waiter in self._waiters],
                "handover": moving and {"to": to.name if to else None, "phase": moving.phase,
                                        "phase_s": now - moving.phase_since, "why": moving.why},
                "resident": dict(self._residents), "idle_left_s": None if left is None else max(0.0, left),
                "handovers": list(self._ledger)}


def median(values):
    """The middle one, or None of nothing."""
    return sorted(values)[len(values) // 2] if values else None


# ----- Child --------------------------------------------------------------------------------------------------
#
# sd-server frees its weights only by ending, so it is a child process, and its existence is the state. Its group is
# killed as a whole; what left the group is found by the token in its environment. If stadi itself is killed, a small
# shell on a pipe (the guard) kills the group; what even that missed is ended by the next start, from the record.

TERM_SECONDS, KILL_SECONDS = 3.0, 10.0          # from TERM to KILL (sd-server needs 0.1); from KILL to "the driver hangs"
LOG_BYTES = 10 * MIB
GUARD = 'read -r _; kill -s KILL -- "-$0"'      # dash knows no "kill -9 --"
TOKEN = "STADI_CHILD"

def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]

def process_start(pid):
    """When a process started, in clock ticks since boot (field 22 of stat); None when there is none, or a zombie."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    return None

def kin(group, token):
    """Live processes that are in the group (a process group's id) or carry the token in their environment."""
    mark, found = f"{TOKEN}={token}".encode(), []
    for pid in pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if process_start(pid) and pid != os.getpid() and (
                    os.getpgid(pid) == group or mark in file.read().split(b"\0")):
                found.append(pid)
    return found

def end_kin(group, token, seconds=2.0):
    """Kill them until none is left; True when none is."""
    end = time.monotonic() + seconds
    while found := kin(group, token):
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True

def listeners(port):
    """Inodes of the sockets that listen on a TCP port of this machine."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
            found.update(row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port)
    return found

def sockets_of(pid):
    """Inodes of a process's sockets; empty when it may not be looked at."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}")))
    return found

def who_listens(inodes):
    """Words for the processes behind these sockets: pid and name."""
    found = []
    for pid in pids():
        if inodes & sockets_of(pid):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                found.append(f"pid {pid} ({file.read().strip()})")
    return ", ".join(found) or "a process of another user"

def boot_id():
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


class SpawnError(Exception):
    """The child could not be started; the text names the file and the cause."""


def _why_not(program, error):
    """The cause behind an OSError of exec, which is alike for several."""
    if isinstance(error, FileNotFoundError):
        return "its interpreter (the first line) is missing" if os.path.exists(program) else "no such file"
    if isinstance(error, PermissionError):
        return "it is a folder" if os.path.isdir(program) else "it may not be executed (chmod +x)"
    return "it is no program of this machine's kind" if error.errno == errno.ENOEXEC else error.strerror or str(error)


class Child:
    """One life of the sd-server process. Made by spawning it; ends by stop() or by itself. Raises SpawnError."""

    def __init__(self, argv, port, folder):
        self.port, self.since = port, time.monotonic()
        self.ready = False                              # set by Sd.ready(): it has answered; ends with stop()
        self.gone = threading.Event()                   # its whole group has ended
        self.log_file, self._record_file = os.path.join(folder, "sd-server.log"), record_file(folder, port)
        self._token = f"{os.getpid()}-{time.time_ns()}"
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._log = open(self.log_file, "ab", buffering=0)
            self._trim_log()
            self._log_start = self._log.tell()
        except OSError as error:
            raise SpawnError(f"its log {self.log_file} cannot be written: {error.strerror}; is -sd-log-dir"
                             " (STADI_SD_LOG_DIR) a folder of stadi's?") from None
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True,
                env={**os.environ, TOKEN: self._token})
        except OSError as error:
            self._log.close()
            raise SpawnError(f"{argv[0]} cannot be run: {_why_not(argv[0], error)}") from None
        self.pid = self._process.pid
        try:
            self._guard = subprocess.Popen(["/bin/sh", "-c", GUARD, str(self.pid)], stdin=subprocess.PIPE,
                                           start_new_session=True)
            threading.Thread(target=self._reap, name="reaper", daemon=True).start()
        except (OSError, RuntimeError) as error:        # no processes, no threads left: not without a guard
            end_kin(self.pid, self._token)
            self._process.wait()
            self._log.close()
            raise SpawnError(f"it cannot be guarded: {error}") from None
        self._record(argv)

    def _record(self, argv):
        record = {"pid": self.pid, "start": process_start(self.pid), "boot": boot_id(), "argv": argv,
                  "token": self._token, "owner": os.getpid(), "owner_start": process_start(os.getpid())}
        try:
            with open(self._record_file + ".new", "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(self._record_file + ".new", self._record_file)
        except OSError as error:
            log.warning("the record of sd-server's pid cannot be written (%s): if stadi is killed, only the guard ends"
                        " it", error)

    def _reap(self):
        """Waits for the leader's death, ends what is left of it, and only then frees its pid."""
        poller, pidfd = select.poll(), os.pidfd_open(self.pid)
        poller.register(pidfd, select.POLLIN)
        while not poller.poll(1000):
            with contextlib.suppress(OSError):
                self._trim_log()
        os.close(pidfd)
        if not end_kin(self.pid, self._token):
            log.error("helpers of sd-server cannot be killed: pids %s", kin(self.pid, self._token))
        self._guard.kill()
        self._guard.wait()
        self._guard.stdin.close()
        self._process.wait()
        self._log.close()
        with contextlib.suppress(OSError):
            os.unlink(self._record_file)
        self.gone.set()
        log.info("sd-server (pid %d) ended: %s", self.pid, self.how_it_ended())

    def _trim_log(self):
        """Keep the log under LOG_BYTES, with one older generation; the child's own descriptor appends."""
        if os.fstat(self._log.fileno()).st_size > LOG_BYTES:
            with open(self.log_file, "rb") as now, open(self.log_file + ".1", "wb") as older:
                now.seek(-LOG_BYTES, os.SEEK_END)
                shutil.copyfileobj(now, older)
            self._log.truncate(0)
            self._log_start = 0

    @property
    def alive(self):
        return not self.gone.is_set()

    def how_it_ended(self):
        code = self._process.returncode
        if code is None:
            return "still running"
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def tail(self, size=4000):
        """The last bytes of this child's log, as lines; of a progress bar only its last state."""
        with contextlib.suppress(OSError), open(self.log_file, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start if self._log_start <= end else 0, end - size))
            lines = file.read(size).decode("utf-8", "replace").splitlines()
            return [line.rstrip("\r").rpartition("\r")[2].strip() for line in lines if line.strip()]
        return []

    def last_words(self):
        """The lines that say why it ended: those with an error in them, then the last ones."""
        lines = self.tail(64 * 1024)
        errors = [line for line in lines[:-4] if re.search("error|fail", line, re.IGNORECASE)]
        return "; ".join(errors[:2] + lines[-4:]) or "its log is empty"

    def listening(self):
        """Whether the child listens on its port. Raises SpawnError when a stranger does."""
        strangers = inodes = listeners(self.port)
        for pid in kin(self.pid, self._token) if inodes else ():
            strangers = strangers - sockets_of(pid)
        if strangers and self.alive:
            raise SpawnError(f"port {self.port} is held by {who_listens(strangers)} as well")
        return bool(inodes)

    def stop(self, seconds=TERM_SECONDS, kill_seconds=KILL_SECONDS):
        """TERM, then KILL after these seconds. True when it is gone; False when even KILL does not end it."""
        self.ready = False
        for sig, wait in ((signal.SIGTERM, seconds), (signal.SIGKILL, kill_seconds)):
            if self.gone.is_set():
                return True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, sig)
                os.killpg(self.pid, signal.SIGCONT)     # a stopped one hears no TERM
            if self.gone.wait(wait):
                return True
        return False


def record_file(folder, port):
    return os.path.join(folder, f"sd-server-{port}.json")

def end_orphan(folder, port):
    """End the child of a stadi that was killed: by pid, start time and command, or by the token; never a stranger."""
    path = record_file(folder, port)
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        pid, owner, argv = record["pid"], record["owner"], [word.encode() for word in record["argv"]]
        if record["boot"] != boot_id() or process_start(owner) == record["owner_start"] is not None:
            return
        same = process_start(pid) == record["start"] is not None
        if same:
            with open(f"/proc/{pid}/cmdline", "rb") as file:    # a script's interpreter stands before its argv
                same = file.read().split(b"\0")[:-1][-len(argv) + 1:] == argv[1:]
        if found := kin(pid if same else -1, record["token"]):
            log.warning("ending sd-server (pids %s), left behind by an earlier stadi", found)
            end_kin(pid if same else -1, record["token"])
        os.unlink(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the record %s cannot be used: %s", path, error)


# ----- Engines ------------------------------------------------------------------------------------------------

CALL_SECONDS, CALL_BYTES = 5.0, 16 * MIB        # bounds on one call of stadi's own to an engine
POLL_FIRST, POLL_LAST = 0.05, 0.5
WARM_SECONDS = 600.0


class Trouble(Exception):
    """An engine that could not be asked; the text says why and what to do. answered: it is there, but not what it
    should be, so that no waiting mends it."""

    answered = False


def call(endpoint, method, path, body=None, headers=(), seconds=CALL_SECONDS, most=CALL_BYTES):
    """One request of stadi's own to an engine: (status, body). Raises Trouble; bounded in time and size as a whole."""
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=seconds)
    data = None if body is None else json.dumps(body).encode()
    late = threading.Timer(seconds, lambda: connection.sock and connection.sock.shutdown(socket.SHUT_RDWR))
    late.daemon = True
    try:
        connection.connect()
        late.start()
        connection.request(method, path, data, {"Connection": "close", "Content-Type": "application/json",
                                                **dict(headers)})
        answer = connection.getresponse()
        content = answer.read(most + 1)
        if len(content) > most or answer.length:
            raise ValueError(f"the answer is longer than {most >> 20} MiB" if len(content) > most else
                             "the answer was cut short")
        return answer.status, content
    except ConnectionRefusedError:
        raise Trouble(f"nothing listens on {endpoint}; is it running?") from None
    except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:
        slow = isinstance(error, TimeoutError) or late.finished.is_set()
        why = f"no answer within {seconds:g}s" if slow else getattr(error, "strerror", "") or str(error)
        raise Trouble(f"{endpoint} {method} {path}: {why or type(error).__name__}") from None
    finally:
        late.cancel()
        connection.close()

def parsed(content):
    """JSON, or None for what is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


class Engine:
    """What the Card and the followers ask of an engine. A new engine is a new class and one line in the wiring."""

    name, kind, title = "", LLM, ""
    greeting = ""               # what it is asked once at the start
    hint = ""                   # what to say to those who wait for it
    idle_after = None           # seconds without a hold until the card frees itself of it; None never
    busy_limit = 0              # seconds to wait for work that only the engine knows of; 0: the waiter's limit ends it
    job_bound = 0               # seconds that one job may take; 0 none
    jobs = ()                   # paths whose work goes on after the answer, beside other such work
    fresh = False               # a new connection for each request
    stoppable = False           # its work can be ended when nobody wants it any more

    def __init__(self, endpoint, patience=CALL_SECONDS):
        self.endpoint, self.trouble, self.patience = endpoint, "", min(patience or CALL_SECONDS, CALL_SECONDS)

    def ask(self, method, path, body=None, **bounds):
        """(status, parsed JSON) of one call, with what went wrong remembered for the status. Raises Trouble."""
        try:
            status, content = call(self.endpoint, method, path, body, **{"seconds": self.patience, **bounds})
        except Trouble as error:
            self.note(str(error))
            raise
        return status, parsed(content)

    def note(self, trouble):
        """Remember, and log once, what is wrong with this engine; "" when nothing is."""
        if trouble and trouble != self.trouble:
            log.warning("%s: %s", self.title, trouble)
        self.trouble = trouble

    def probe(self):
        """Asked once at the start; a failure is only said."""
        with contextlib.suppress(Trouble):
            status, _ = self.ask("GET", self.greeting)
            self.note("" if status == 200 else f"GET {self.greeting} gave {status}")

    def resident(self):
        """Whether it may have VRAM now; None when it can't be told."""

    def busy(self):
        """Whether it works on something that stadi holds nothing for."""
        return False

    def evict(self):
        """Make it give the VRAM back; an Eviction. Raises Refused when nothing may be loaded beside it."""
        return Eviction(False, True)

    def nudge(self):
        """Said again while its VRAM has not come back."""

    def evicted(self):
        """Its VRAM was seen to have come back."""

    def ready(self, cancelled):
        """Make it usable; True if that started something. Raises Refused, or GivenUp once cancelled is set."""
        return False

    def spares(self, path, request, body):
        """Whether this request, on a route that takes the card, plainly never uses the GPU."""
        return False

    def job_of(self, path, status, body):
        """The id of the job that goes on after this answer, or None."""

    def ended(self, job):
        """How that job stands: ended, running, queued, or unknown when it can't be told now."""
        return "ended"

    def finished(self, job):
        """Called by its follower when it has ended, before the card is let go."""

    def give_up(self, job):
        """The job (None: one of unknown id) has outlived its bound, or its hold was taken away by hand."""

    def describe(self):
        return {"url": f"http://{self.endpoint}", "kind": self.kind, "error": self.trouble or None}


class Router(Engine):
    """llama.cpp's router (llama-server without a model): many models, loaded on demand, unloaded by request."""

    name, kind, title = "llama", LLM, "llama.cpp's router"
    HOLDING = ("loading", "loaded", "sleeping")         # a downloading model must never be unloaded: it would stop

    def __init__(self, endpoint, key, busy_wait, unload_wait):
        super().__init__(endpoint, unload_wait)
        self.busy_limit, self._unload_wait, self._key = busy_wait, unload_wait, key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, method, path, body=None, **bounds):
        return super().ask(method, path, body, headers=self._headers, **bounds)

    def probe(self):
        self.resident()

    def models(self):
        """{model's id or alias: status}. Raises Trouble when this is no router, or does not answer as one."""
        status, answer = self.ask("GET", "/models")
        rows, trouble = answer.get("data") if isinstance(answer, dict) else None, ""
        if status == 401:
            trouble = ("it refuses the key in -llm-key (STADI_LLM_KEY)" if self._key else
                       "it wants its --api-key: set -llm-key (STADI_LLM_KEY)")
        elif status != 200 or not isinstance(rows, list):
            trouble = f"GET /models gave {status} and no list of models: is it llama-server in router mode?"
        elif not all(isinstance(row, dict) and isinstance(row.get("status"), dict) for row in rows):
            trouble = ("it was started with a model, so it can't be asked to give the card back: start llama-server"
                       " without -m (router mode)")
        self.note(trouble)
        if trouble:
            error = Trouble(trouble)
            error.answered = True
            raise error
        return {str(name): row["status"].get("value") for row in rows
                for name in (row.get("id"), *(row.get("aliases") or ())) if name}

    def _having(self, *statuses):
        return [name for name, status in self.models().items() if status in statuses]

    def resident(self):
        with contextlib.suppress(Trouble):
            return bool(self._having(*self.HOLDING))
        return None

    def busy(self):
        """Generations outlive connections. Only `loaded` models are asked: asking a sleeping one wakes it."""
        with contextlib.suppress(Trouble):
            for name in self._having("loaded"):
                status, slots = self.slots(name)
                if status == 200 and isinstance(slots, list) and any(
                        isinstance(slot, dict) and slot.get("is_processing") for slot in slots):
                    return True
        return False

    def slots(self, name):
        return self.ask("GET", "/slots?" + urllib.parse.urlencode({"model": name, "autoload": "false"}))

    def evict(self):
        asked, end, pause = set(), time.monotonic() + self._unload_wait, POLL_FIRST
        try:
            while holding := self._having(*self.HOLDING):
                for name in holding:
                    if name not in asked and self.ask("POST", "/models/unload", {"model": name})[0] in (200, 400):
                        asked.add(name)
                if time.monotonic() > end:
                    return Eviction(True, False, f"{self.title} still has {', '.join(holding)} after"
                                                 f" {self._unload_wait:g}s (-vram-wait); went on")
                time.sleep(pause)
                pause = min(POLL_LAST, pause * 1.5)
            return Eviction(bool(asked), True)
        except Trouble as error:
            return Eviction(bool(asked), False, f"{self.title} could not be unloaded: {error}; went on")

    def loaded(self, wanted):
        """Whether each of these models is loaded, so that asking about them loads nothing."""
        with contextlib.suppress(Trouble):
            models = self.models()
            return bool(wanted) and all(models.get(name) == "loaded" for name in wanted)
        return False


class Results:
    """Finished jobs of a child that may be gone: id -> the answer's bytes; by age and size, the oldest out first."""

    SECONDS, BYTES = 600.0, 256 * MIB

    def __init__(self):
        self._lock, self._kept, self._size = threading.Lock(), collections.OrderedDict(), 0

    def keep(self, job, content):
        with self._lock:
            self._forget(job)
            self._kept[job] = (time.monotonic(), content)
            self._size += len(content)
            while self._size > self.BYTES:
                self._forget(next(iter(self._kept)))

    def get(self, job):
        with self._lock:
            for old in [name for name, (at, _) in self._kept.items() if time.monotonic() - at > self.SECONDS]:
                self._forget(old)
            return self._kept[job][1] if job in self._kept else None

    def _forget(self, job):
        if job in self._kept:
            self._size -= len(self._kept.pop(job)[1])


class Sd(Engine):
    """stable-diffusion.cpp's sd-server, as stadi's child."""

    name, kind, title = "sd", IMAGE, "sd-server"
    fresh = stoppable = True    # it has eight threads, one per connection: none may be kept idle
    jobs = ("/sdcpp/v1/img_gen", "/sdcpp/v1/vid_gen")
    ENDS = ("completed", "failed", "cancelled")

    def __init__(self, endpoint, argv, folder, idle_after, load_wait, render_wait):
        super().__init__(endpoint)
        self.idle_after, self.job_bound, self._load_wait = idle_after or None, render_wait, load_wait
        self._argv, self._folder, self.child, self.results, self._closed = argv, folder, None, Results(), False

    @property
    def up(self):
        return self.child is not None and self.child.alive

    @property
    def serving(self):
        """Up, loaded, and not on its way out."""
        child = self.child
        return child is not None and child.ready and child.alive and process_start(child.pid) is not None

    def probe(self):
        """It is a child: nothing is there yet."""

    def resident(self):
        return self.up

    def evict(self):
        child = self.child
        if not child or not child.alive:
            return Eviction(False, True)
        if not child.stop():
            self.note(f"pid {child.pid} does not end even by KILL (a hung driver?): nothing can be loaded beside it;"
                      " restart the machine if it stays")
            raise Refused(503, f"sd-server {self.trouble}", "child_stuck", 60, everyone=True)
        self.note("")
        return Eviction(True, True)

    def close(self):
        """Stop the child for good: stadi ends. True when it is gone."""
        self._closed = True
        return not self.child or self.child.stop(1.5, 2.0)

    def ready(self, cancelled):
        if self.serving:
            return False
        self.evict()
        try:
            if inodes := listeners(self.endpoint.port):
                raise SpawnError(f"port {self.endpoint.port} is held by {who_listens(inodes)}; end it, or let sd-server"
                                 " have another port (-sd, and --listen-port in -sd-args)")
            if self._closed:
                raise SpawnError("stadi is ending")
            self.child = Child(self._argv, self.endpoint.port, self._folder)
            log.info("sd-server started: pid %d, log %s", self.child.pid, self.child.log_file)
            self._await(self.child, cancelled)
        except (SpawnError, GivenUp) as error:
            if self.child:
                self.child.stop()
            if isinstance(error, GivenUp):
                raise
            self.note(str(error))
            raise Refused(502, f"sd-server did not start: {error}", "engine_error") from None
        self.note("")
        return True

    def _await(self, child, cancelled):
        """Ready is: alive, it (not a stranger) listens, it answers. The port opens only after the load."""
        end, pause = time.monotonic() + self._load_wait, 0.02
        while True:
            if child.gone.wait(pause):
                raise SpawnError(f"it ended while loading ({child.how_it_ended()}): {child.last_words()}")
            if cancelled.is_set():
                raise GivenUp
            if self._closed:
                raise SpawnError("stadi is ending")
            if child.listening():
                with contextlib.suppress(Trouble):
                    call(self.endpoint, "GET", "/sdcpp/v1/capabilities")
                    child.ready = child.listening()     # once more: who answered was the child
                    return
            if time.monotonic() > end:
                raise SpawnError(f"its port {child.port} did not answer within {self._load_wait:g}s (-load-wait);"
                                 f" its log: {child.log_file}")
            pause = min(0.1, pause * 1.2)

    def job_of(self, path, status, body):
        answer = parsed(body) if status == 202 and path in self.jobs else None
        job = answer.get("id") if isinstance(answer, dict) else None
        return job if isinstance(job, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", job) else None

    def ended(self, job):
        """Its result is kept: the child's memory ends with the child."""
        try:
            status, content = call(self.endpoint, "GET", f"/sdcpp/v1/jobs/{job}", seconds=30, most=Results.BYTES)
        except Trouble:
            return "unknown" if self.serving else "ended"
        answer = parsed(content) if status == 200 else None
        state = answer.get("status") if isinstance(answer, dict) else None
        if state in self.ENDS:
            self.results.keep(job, content)
        if state in self.ENDS or status in (404, 410):
            return "ended"
        return {"generating": "running", "queued": "queued"}.get(state, "unknown")

    def give_up(self, job):
        self.evict()

    def describe(self):
        child = self.child if self.up else None
        return {**super().describe(), "pid": child and child.pid, "ready": self.serving,
                "up_s": child and time.monotonic() - child.since,
                "log_file": os.path.join(self._folder, "sd-server.log")}


class Ollama(Engine):
    """Ollama: an unload is answered before it happens, and a model that is being loaded is not in /api/ps."""

    name, kind, title, greeting = "ollama", LLM, "Ollama", "/api/version"
    UNLOAD = {"/api/generate": ("prompt", ""), "/api/chat": ("messages", [])}

    def __init__(self, endpoint, unload_timeout):
        super().__init__(endpoint, unload_timeout)
        self._unload_timeout = unload_timeout

    def _loaded(self):
        status, answer = self.ask("GET", "/api/ps")
        models = answer.get("models") if status == 200 and isinstance(answer, dict) else None
        if not isinstance(models, list):
            self.note(f"GET /api/ps gave {status} and no list of models")
            raise Trouble(self.trouble)
        self.note("")
        return [str(row["name"]) for row in models if isinstance(row, dict) and row.get("name")]

    def resident(self):
        with contextlib.suppress(Trouble):
            return bool(self._loaded())
        return None

    def evict(self):
        asked, empty, end, pause = set(), 0, time.monotonic() + self._unload_timeout, 2 * POLL_FIRST
        while True:
            try:
                loaded = self._loaded()
                empty = 0 if loaded else empty + 1      # a reload with other options is empty for a moment
                if empty == (2 if asked else 1):
                    return Eviction(bool(asked), True)
                for name in [name for name in loaded if name not in asked]:
                    asked.add(name)
                    if not 200 <= self.ask("POST", "/api/generate", {"model": name, "keep_alive": 0})[0] < 300:
                        self.ask("POST", "/api/embed", {"model": name, "input": "x", "keep_alive": 0})    # old servers
                note = f"{self.title} still has {', '.join(loaded)} after {self._unload_timeout:g}s (-unload-timeout)"
            except Trouble as error:
                note = f"{self.title} could not be unloaded: {error}"
                if not asked:
                    return Eviction(False, False, note + "; went on")
            if time.monotonic() > end:
                return Eviction(bool(asked), False, note + "; went on")
            time.sleep(pause)
            pause = min(POLL_LAST, pause * 1.5)

    def spares(self, path, request, body):
        """The unload form, and cloud models, if the body is small, plain and can be read in one way only (Go's reader
        matches keys without regard to case, the last one wins, and stops after the first value)."""
        if body is None or re.search(rb"(?im)^content-encoding:", request.fields) or not body.isascii():
            return False
        try:
            value = json.loads(body, object_pairs_hook=_unambiguous)
        except (ValueError, RecursionError):
            return False
        model = value.get("model") if isinstance(value, dict) else None
        if not isinstance(model, str):
            return False
        tag = model.rpartition(":")[2] if ":" in model else ""
        key, nothing = self.UNLOAD.get(path, (None, None))
        keep = value.get("keep_alive")
        zero = keep in ("0", "0s") if isinstance(keep, str) else type(keep) in (int, float) and keep == 0
        return tag == "cloud" or tag.endswith("-cloud") and "/" not in tag or bool(
            key and zero and value.get(key, nothing) == nothing and set(value) <= {"model", "keep_alive", "stream", key})

    def warm(self, card, hold, model):
        """Load a model as work that nobody waits for: cut as soon as a request for another engine waits."""
        connection = http.client.HTTPConnection(self.endpoint.host, self.endpoint.port, timeout=WARM_SECONDS)
        hold.on_revoke = lambda: connection.sock and connection.sock.shutdown(socket.SHUT_RDWR)
        try:
            connection.connect()
            if not hold.revoked:
                connection.request("POST", "/api/generate", json.dumps({"model": model, "keep_alive": -1}))
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    log.warning("%s could not warm %s: status %d", self.title, model, answer.status)
        except (OSError, http.client.HTTPException) as error:
            log.info("warming %s ended: %s", model, hold.revoked or error)
        finally:
            connection.close()
            card.release(hold)


def _unambiguous(pairs):
    """An object whose keys are ASCII, lower case and not repeated; else ValueError."""
    value = dict(pairs)
    if len(value) != len(pairs) or any(not key.isascii() or key != key.lower() for key in value):
        raise ValueError("this object can be read in two ways")
    return value


class Comfy(Engine):
    """ComfyUI: jobs run after their answer, in its own queue; whether it has VRAM can't be asked, only remembered."""

    name, kind, title, greeting = "comfy", IMAGE, "ComfyUI", "/system_stats"
    FREE = {"unload_models": True, "free_memory": True}
    LONG = {"seconds": 30, "most": 4 * CALL_BYTES}      # loading a model blocks its HTTP; a queue can be megabytes
    hint = ("; if a node of its workflow asked for this, it waits for itself: point the node, and OLLAMA_HOST of Ollama"
            " itself, at Ollama's own address instead of stadi's")

    def __init__(self, endpoint, keep, job_timeout, used):
        super().__init__(endpoint)
        self.idle_after, self.job_bound, self._used = keep, job_timeout, used
        self._freed = self._was_freed = False           # a confirmed /free, and no job since
        self._asked_free, self._before = False, None    # a /free since the last job; bytes used before it
        self._stuck_since = None
        self.given_up = []                              # ids of jobs that nobody follows any more

    def reading(self):
        """Its card's memory: a Reading. What others can have is vram_free - torch_vram_free, device-wide."""
        try:
            device = self.ask("GET", "/system_stats")[1]["devices"][0]
            total = int(device["vram_total"])
            return Reading(total - (int(device["vram_free"]) - int(device["torch_vram_free"])), total)
        except (Trouble, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"/system_stats can't be read: {error}") from None

    def _queue(self):
        """(ids running, ids waiting). Raises Trouble."""
        answer = self.ask("GET", "/queue", **self.LONG)[1]
        try:
            return tuple([str(row[1]) for row in answer[name]] for name in ("queue_running", "queue_pending"))
        except (KeyError, IndexError, TypeError):
            raise Trouble("GET /queue gave no queue") from None

    def _working(self):
        """Whether its queue has work, apart from what was given up. Raises Trouble."""
        if self.given_up:
            ids = sum(self._queue(), [])
            self.given_up = [job for job in self.given_up if job in ids]
            return any(job not in self.given_up for job in ids)
        status, answer = self.ask("GET", "/prompt")
        try:
            return answer["exec_info"]["queue_remaining"] > 0
        except (KeyError, TypeError):
            raise Trouble(f"GET /prompt gave {status} and no queue_remaining") from None

    def busy(self):
        with contextlib.suppress(Trouble):
            return self._working()
        return False

    def resident(self):
        """Work that reached it past stadi fills the card as well."""
        try:
            if self._working():
                self._freed = self._asked_free = False
            self.note("")
        except Trouble:
            return False if self._freed else None
        return not self._freed

    def evict(self):
        try:
            if self._asked_free:
                return Eviction(True, True, before=self._before)
            self._free()
            return Eviction(True, True)
        except Trouble as error:
            return Eviction(False, False, f"{self.title} could not be freed: {error}; went on")

    def _free(self):
        status, _ = self.ask("POST", "/free", self.FREE)
        if status != 200:
            raise Trouble(f"POST /free gave {status}")
        self._asked_free = True

    def nudge(self):
        """A /free that comes just after a job's end can sleep through its wake-up: said again, it is heard."""
        with contextlib.suppress(Trouble):
            self._free()

    def evicted(self):
        self._freed = True

    def ready(self, cancelled):
        self._was_freed, self._freed, self._asked_free = self._freed, False, False
        return False

    def job_of(self, path, status, body):
        if 400 <= status < 500:                         # nothing was queued
            self._freed = self._was_freed
        answer = parsed(body) if status == 200 else None
        job = answer.get("prompt_id") if isinstance(answer, dict) else None
        return str(job) if job and re.fullmatch(r"[\w.:-]{1,200}", str(job)) else None

    def ended(self, job):
        """Once accepted, a job is in the queue or in the history, unless it was deleted or the process died. Its clock
        runs from the acceptance."""
        name = urllib.parse.quote(job, safe="")
        try:
            for last in (False, True):
                status, history = self.ask("GET", f"/history/{name}", **self.LONG)
                if status != 200 or not isinstance(history, dict):
                    return "unknown"
                if job in history:
                    return "ended"
                running, pending = ((), ()) if last else self._queue()
                if job in running or job in pending:
                    self._stuck_since = None if running else self._stuck_since or time.monotonic()
                    stuck = self._stuck_since and time.monotonic() - self._stuck_since > CALL_SECONDS
                    self.note("jobs wait and none runs: its worker died; restart ComfyUI" if stuck else "")
                    return "unknown"
        except Trouble:
            return "unknown"
        return "ended"

    def finished(self, job):
        if self.idle_after == 0:
            self._before = self._used()
            with contextlib.suppress(Trouble):
                self._free()
                say_job("/free sent", self, job)

    def give_up(self, job):
        jobs = [job]
        with contextlib.suppress(Trouble):
            jobs = [job] if job else sum(self._queue(), [])     # released before its answer: whatever is there
        self.given_up = [*self.given_up, *jobs][-99:]
        self.finished(job)

    def describe(self):
        return {**super().describe(), "given_up": self.given_up}


def follow(card, hold):
    """A follower's life: keep hold until its job has ended, or has outlived its engine's job_bound.

    The clock runs from the moment the job is seen to be running; while it is queued behind others, theirs runs.
    """
    engine, job, start, running, pause = hold.engine, hold.job, time.monotonic(), False, 0.1
    say_job("accepted", engine, job)
    while not hold.over.wait(pause):
        state, now = engine.ended(job), time.monotonic()
        if state == "ended":
            say_job("ended", engine, job)
            engine.finished(job)
            break
        if state == "queued" or state == "running" and not running:
            start, running = now, state == "running"
        if engine.job_bound and now - start > engine.job_bound:
            log.warning("%s: job %s has not ended within %gs; the card is let go", engine.title, job, engine.job_bound)
            engine.give_up(job)
            break
        pause = min(POLL_LAST, pause * 1.5)
    card.release(hold)
    say_job("card let go", engine, job)

def say_job(what, engine, job):
    log.info("image job: %s", what, extra={"fields": {"engine": engine.name, "prompt_id": job}})


# ----- Routes -------------------------------------------------------------------------------------------------
#
# The engines match on the decoded path, the router also on the decoded query. The class is chosen twice, on the path
# as it came and on the decoded, cleaned one; where the two differ the request is refused, so that nobody can write a
# GPU route in a way that stadi does not see.

TAKE, PASS, WATCH, OWN, STEER = "take", "pass", "watch", "own", "steer"


class BadMessage(Exception):
    """Bytes that are no clean HTTP, or a target that could be read in two ways; answered, and the connection closed."""

    def __init__(self, text, status=400):
        super().__init__(text)
        self.status = status


class Route(NamedTuple):
    kind: str                   # TAKE, PASS, WATCH, OWN
    engine: str                 # name; "" for OWN
    path: str                   # decoded and cleaned


READS = ("GET", "HEAD")
PLAIN = r"/(?:(?!\.{0,2}(?:/|$))[A-Za-z0-9_.-]+(?:/|$))*"       # no %, no //, no dot segment
ANY = r".*"
RELEASES = r"/(?:gpu-turnstile|stadi)/release"

LLAMA_SD = (                                                    # methods (None: all), path, class, engine
    (("OPTIONS",), ANY, PASS, "llama"),
    (("POST",), RELEASES, OWN, ""),
    (None, r"/status|/healthz", OWN, ""),
    (READS, r"/metrics", (OWN, WATCH), "llama"),
    (("POST",), r"/v1/images/.+", TAKE, "sd"),
    (("POST",), r"/sdapi/v1/(?:txt2img|img2img)", TAKE, "sd"),
    (("POST",), r"/sdcpp/v1/(?:img_gen|vid_gen)", TAKE, "sd"),
    (None, r"/v1/images/.+|/sdapi(?:/.*)?|/sdcpp(?:/.*)?", WATCH, "sd"),
    (None, r"/cors-proxy/?", TAKE, "llama"),                    # it can fetch the router's own URLs
    (READS, PLAIN, (PASS, WATCH), "llama"),                     # with a model in the query it loads that one: watch
    (("POST",), r"/models|/models/unload|/v1/streams/lookup", PASS, "llama"),
    (("DELETE",), r"/models|/v1/stream", PASS, "llama"),
    (("POST",), r"/v1/chat/completions/control", STEER, "llama"),
    (None, ANY, TAKE, "llama"),
)
OWN_ROWS = ((("OPTIONS",), ANY, PASS, None), (("POST",), RELEASES, OWN, ""), (None, r"/status|/healthz", OWN, ""))


def passing_table(engine, gated, own=()):
    """The table of a front that passes everything but its own rows and the gated POSTs."""
    rows = [(methods, pattern, kind, engine if name is None else name) for methods, pattern, kind, name in OWN_ROWS]
    return (*rows, *own, (("POST",), gated, TAKE, engine), (None, ANY, PASS, engine))


OLLAMA_TABLE = passing_table(
    "ollama", r"/api/(?:generate|chat|embed|embeddings)|/v1/(?:chat/completions|completions|embeddings|responses"
    r"|messages|audio/transcriptions|images/generations|images/edits)", (((*READS,), r"/metrics", OWN, ""),))


def comfy_table(gates):
    """Every route of ComfyUI exists twice, the second time under /api."""
    return passing_table("comfy", "(?:/api)?(?:" + "|".join(re.escape(path) for path in ("/prompt", *gates)) + ")")


def decoded(text):
    """Percent-decoding as the engines' HTTP library does it: %XX, and %uXXXX."""
    text = re.sub(r"%u([0-9A-Fa-f]{4})", lambda found: chr(int(found[1], 16)), text)
    return re.sub(r"%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), text)


def cleaned(path):
    """The path without fragment, doubled slashes, dot segments and trailing slash."""
    parts = []
    for part in path.partition("#")[0].replace("\\", "/").split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def query_values(query, key):
    """All values of a key in a query, decoded as the router decodes them."""
    if key not in query and "%" not in query:
        return []
    pairs = (part.partition("=") for part in query.replace("+", " ").split("&"))
    return [decoded(value) for name, _, value in pairs if decoded(name) == key]


class Table:
    """The routes of one front. strict: what does not look canonical never passes without the card."""

    MEMORY = 4096                       # paths whose route is remembered

    def __init__(self, rows, strict):
        self._rows, self._strict, self._known = rows, strict, {}

    def _row(self, method, path):
        for methods, pattern, kind, engine in self._rows:
            if (methods is None or method in methods) and re.fullmatch(pattern, path, re.DOTALL):
                return kind, engine
        raise BadMessage(f"no route for {method} {path!r}", 404)

    def _route(self, method, path):
        clean = cleaned(decoded(path))
        row = self._row(method, path)
        odd = self._strict and row[0] in (PASS, WATCH) and method != "OPTIONS" and not re.fullmatch(PLAIN, path)
        if odd or row != self._row(method, clean):
            raise BadMessage("this path can be read in two ways; write it plainly")
        return Route(*row, clean)

    def classify(self, method, target):
        """The Route of a request by its method and its target as it came. Raises BadMessage."""
        path, _, query = target.partition("?")
        route = self._known.get((method, path))
        if route is None:
            if len(self._known) >= self.MEMORY:
                self._known.clear()
            route = self._known[method, path] = self._route(method, path)
        if type(route.kind) is tuple:
            return route._replace(kind=route.kind[bool(query and query_values(query, "model"))])
        return route


# ----- Wire ---------------------------------------------------------------------------------------------------
#
# What is ambiguous is refused, never repaired. One compiled expression judges a whole head, in C, without backtracking
# (possessive quantifiers); a second finds the few fields that matter; all others go on byte for byte.

HEAD_BYTES = 64 * 1024
FIELDS_MOST = 256
HEAD_SECONDS = 10.0             # from a head's first byte to its last
INTERIM_MOST = 64               # 1xx answers before the real one
CHUNK_LINE = 1024

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_FIELD = _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*+\r\n"
_TARGET = rb"[A-Za-z0-9\-._~!$&'()*+,;=:@%/?\[\]|{}^]++"
REQUEST = re.compile(rb"(" + _TOKEN + rb") (" + _TARGET + rb") HTTP/1\.([01])\r\n((?:" + _FIELD + rb")*+)\r\n")
ANSWER = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d(?: [\t\x20-\x7e\x80-\xff]*+)?+)\r\n((?:" + _FIELD + rb")*+)\r\n")
FIELDS = re.compile(rb"(?:" + _FIELD + rb")*+")
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15}+)(?:;[\t\x20-\x7e\x80-\xff]{0,%d}+)?+\r\n" % CHUNK_LINE)
NOT_TEXT = re.compile(rb"[^\t\r\n\x20-\x7e\x80-\xff]|(?<!\r)\n|\r[^\n]|^\r|^[\x80-\xff]")
HOST = re.compile(r"(?:[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\])(?::\d{1,5})?", re.ASCII)

# Hop-by-hop (RFC 9110, 7.6.1), Expect (answered here), and what stadi sets itself.
_STRIPPED = (rb"connection|keep-alive|proxy-connection|proxy-authenticate|proxy-authorization|te|trailer"
             rb"|transfer-encoding|upgrade|expect|x-forwarded-(?:for|host|proto)")
NOTED = re.compile(rb"\n(" + _STRIPPED + rb"|content-length|host|origin|sec-fetch-site):([^\r]*)")   # in lower case
HOST_AS_SENT = re.compile(rb"(?im)^host:[\t ]*([^\r\t ]*)")
STRIP = re.compile(rb"(?im)^(?:" + _STRIPPED + rb"):[^\n]*\n")
PASSED = frozenset((b"content-length", b"host", b"origin", b"sec-fetch-site"))
LISTS = (b"connection", b"upgrade", b"te", b"trailer", b"keep-alive", b"x-forwarded-for")      # may stand there twice
FRAMES = (b"content-length", b"transfer-encoding", b"host")     # no trailer, and no Connection token, may name these


class Sized:
    """A body of known length. feed(data) says how many bytes of data belong to it, and are sound."""

    def __init__(self, length):
        self.left, self.done = length, length == 0

    def feed(self, data):
        taken = min(self.left, len(data))
        self.left -= taken
        self.done = self.left == 0
        return taken


NOTHING = Sized(0)


def Nothing():
    """The body of a request whose head names none."""
    return NOTHING


class UntilEnd:
    """A body that ends with its connection."""

    done = False

    def feed(self, data):
        return len(data)


class Chunked:
    """A chunked body, judged as it passes; the bytes themselves go on as they are. What is not yet judged (a size line
    cut in two) is not counted: the caller hands it in again with more behind it. Raises BadMessage."""

    def __init__(self):
        self.done, self._left, self._trailer = False, 0, False      # _left: of the chunk, with its CRLF

    def feed(self, data, payload=None):
        """How many bytes are sound; payload, a list, gets what is left without the framing."""
        at, end = 0, len(data)
        while True:
            left = self._left
            if left > 2:
                stop = min(at + left - 2, end)
                if payload is not None:
                    payload.append(data[at:stop])
                self._left = left = left - (stop - at)
                at = stop
            if at == end:
                return at
            if left:
                got = data[at:at + left]
                if not b"\r\n"[2 - left:].startswith(got):
                    raise BadMessage("a chunk does not end where its size says")
                at += len(got)
                self._left = left - len(got)
                if at == end:
                    return at
            if self._trailer:
                return self._end(data, at)
            found = CHUNK.match(data, at)
            if not found:
                if b"\n" in data[at:] or end - at > CHUNK_LINE + 18 or data[at] not in b"0123456789abcdefABCDEF":
                    raise BadMessage("a chunk's size cannot be read")
                return at
            at = found.end()
            size = int(found[1], 16)
            self._trailer = size == 0
            self._left = size + 2 if size else 0

    def _end(self, data, at):
        if data.startswith(b"\r\n", at):
            self.done = True
            return at + 2
        stop = data.find(b"\r\n\r\n", at)
        if stop < 0:
            if len(data) - at > HEAD_BYTES or NOT_TEXT.search(data[at:]):
                raise BadMessage("the trailers cannot be read")
            return at
        fields = data[at:stop + 2]
        if not FIELDS.fullmatch(fields) or any(name in FRAMES for name, _ in NOTED.findall(b"\n" + fields.lower())):
            raise BadMessage("the trailers cannot be read")
        self.done = True
        return stop + 4


class Head:
    """What a request's and an answer's head have in common: fields that go on, and the framing."""

    named = ()                          # the tokens of Connection

    def __init__(self, minor, fields):
        self.minor, self.fields, values, self._again = minor, fields, {}, []
        for name, value in NOTED.findall(b"\n" + fields.lower()):
            value = value.strip(b"\t ")
            if name in values:
                self._again.append(name)
                value = values[name] + b"," + value
            values[name] = value
        self.values = values            # lower-cased; of fields that stand there again, joined
        if not PASSED.issuperset(values):
            self.fields = STRIP.sub(b"", fields)
            if b"connection" in values:
                self._strip_named()
        if fields.count(b"\n") > FIELDS_MOST:
            raise BadMessage("too many header fields", 431)

    def _strip_named(self):
        self.named = [token.strip(b"\t ") for token in self.values[b"connection"].split(b",")]
        for token in self.named:
            if token not in (b"close", b"keep-alive", b"upgrade", b"te", b"") and token not in FRAMES:
                self.fields = re.sub(rb"(?im)^" + re.escape(token) + rb":[^\n]*\n", b"", self.fields)

    def one(self, name):
        """The value of a field that may stand there once at the most, or None."""
        if name in self._again:
            raise BadMessage(f"{name.decode()} stands there more than once")
        return self.values.get(name)

    def framing(self, otherwise):
        """Sized, Chunked, or what otherwise gives where the head says nothing."""
        length, coding = self.one(b"content-length"), self.one(b"transfer-encoding")
        if coding is not None:
            if length is not None or not self.minor or coding != b"chunked":
                raise BadMessage("Transfer-Encoding must be chunked, alone, on HTTP/1.1")
            return Chunked()
        if length is None:
            return otherwise()
        if not (length.isdigit() and 1 <= len(length) <= 18):
            raise BadMessage("Content-Length must be 1 to 18 digits")
        return Sized(int(length))


@functools.lru_cache(1024)
def host_of(value):
    """The Host field's value as text. Raises BadMessage."""
    host = (value or b"").decode("latin-1")
    if not HOST.fullmatch(host):
        raise BadMessage("Host must stand there once, as a name or address with or without a port")
    return host


METHODS = {name.encode(): name for name in ("GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH")}


class Request(Head):
    """A request's head. Raises BadMessage."""

    expects = upgrade = False

    def __init__(self, head):
        found = REQUEST.fullmatch(head)
        if not found:
            raise BadMessage("this is no clean HTTP/1.1 request head")
        method, target, minor, fields = found.groups()
        super().__init__(minor == b"1", fields)
        values, self.method, self.target = self.values, METHODS.get(method), target.decode()
        if not self.method:
            raise BadMessage("this method is not served here", 405 if method in (b"CONNECT", b"TRACE") else 501)
        self.host = host_of(self.one(b"host"))
        if target[0] != 47:                                     # a slash
            self.target = self._origin_form(self.target)
        if len(target) > 8190:
            raise BadMessage("the target is too long", 414)
        self.body = self.framing(Nothing)
        self.keep = self.minor and b"close" not in self.named
        if b"upgrade" in values and b"upgrade" in self.named and self.minor:
            self.upgrade = method == b"GET" and self.body.done and values[b"upgrade"] == b"websocket"
        if b"expect" in values and self.minor:
            self.expects = True
            if values[b"expect"] != b"100-continue":
                raise BadMessage("Expect can only be 100-continue", 417)

    def _origin_form(self, target):
        found = re.fullmatch(r"(?i:http)://([^/?]+)(/.*|)", target)
        if target == "*" and self.method == "OPTIONS":
            return target
        if not found or found[1].lower() != self.host:
            raise BadMessage("the target must be a path, or an http URL that agrees with Host")
        return found[2] or "/"

    def text(self, name):
        value = self.one(name)
        return None if value is None else value.decode("latin-1")

    def upstream_head(self, forwarded, close):
        """The head as it goes to the engine. forwarded: the client's X-Forwarded-For and -Proto lines."""
        lines = [f"{self.method} {self.target} HTTP/1.1\r\n".encode(), self.fields, forwarded,
                 b"X-Forwarded-Host: ", HOST_AS_SENT.search(self.fields)[1], b"\r\n"]
        if self.upgrade:
            lines.append(b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
        elif close:
            lines.append(b"Connection: close\r\n")
        if isinstance(self.body, Chunked):
            lines.append(b"Transfer-Encoding: chunked\r\n")
        elif self.body is NOTHING and self.method not in ("GET", "HEAD", "OPTIONS"):
            lines.append(b"Content-Length: 0\r\n")      # the engines wait for seconds without it
        lines.append(b"\r\n")
        return b"".join(lines)


class Answer(Head):
    """An answer's head, read strictly from a connection; also the response_class of Upstream. Raises BadMessage."""

    def __init__(self, sock, method, interim=None):
        self._sock, self._method, self._interim = sock, method, interim     # interim: gets heads of 102, 103
        self.rest = b""                                                     # bytes read behind the head

    def begin(self):
        for _ in range(INTERIM_MOST):
            found = ANSWER.fullmatch(self._read_head())
            if not found:
                raise BadMessage("the engine's answer has no clean head")
            minor, self.line, fields = found.groups()
            super().__init__(minor == b"1", fields)
            self.status = int(self.line[:3])
            if self.status >= 200 or self.status == 101:
                return self._frame()
            if self._interim and self.status != 100:
                self._interim(b"HTTP/1.1 " + self.line + b"\r\n" + self.fields + b"\r\n")
        raise BadMessage("the engine never came to its real answer")

    def _frame(self):
        self.body = self.framing(UntilEnd)
        if self._method == "HEAD" or self.status in (101, 204, 304):
            self.body = NOTHING
            if self.status == 204:
                self.fields = re.sub(rb"(?im)^content-length:[^\n]*\n", b"", self.fields)
        self.closes = not self.minor or b"close" in self.named or isinstance(self.body, UntilEnd)
        return self

    def _read_head(self):
        data = self.rest
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > HEAD_BYTES or data and NOT_TEXT.search(data):
                raise BadMessage("the engine's answer has no clean head")
            more = self._sock.recv(65536)
            if not more:
                raise ConnectionResetError("it closed the connection before its answer was there")
            data = data + more if data else more
        self.rest = data[end + 4:]
        return data[:end + 4]


# ----- Relay --------------------------------------------------------------------------------------------------
#
# Sockets block, with the kernel's own time limits (settimeout would poll before each call). So a thread that waits in
# recv or send can only be woken by a shutdown of its socket: the Watcher does that when a client leaves.

SMALL, LARGE = 64 * 1024, 1 << 20       # bytes of one recv; LARGE once a body is known to be long
SPOOL_BYTES = 4 * MIB                   # of a body kept in memory while its request waits
COPY_BYTES = 4 * MIB                    # of an answer that is looked at for a job's id
CONNECT_SECONDS, LINGER_SECONDS, VANISHED_SECONDS = 5.0, 2.0, 60
SLOW_SECONDS, SLOW_BYTES = 10.0, 640 * 1024     # a body that holds the card brings that much in that time
REUSE_SECONDS = 2.0                     # an idle connection to an engine older than that carries no POST
RESET = struct.pack("ii", 1, 0)         # SO_LINGER: close by RST

def bound_socket(sock, receive, send):
    """Blocking, without Nagle, with limits in seconds (0: none) kept by the kernel, and dead peers noticed."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_SECONDS * 1000)
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        if seconds:
            sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))

def ready(seconds, *wanted):
    """{file descriptor: events} of the (socket, events) that are ready within that time; 0 and less only looks."""
    poller = select.poll()
    for sock, events in wanted:
        poller.register(sock, events)
    return dict(poller.poll(max(0.0, seconds) * 1000))

def readable(sock, seconds):
    """Whether the socket has something to read, or has ended."""
    return bool(ready(seconds, (sock, select.POLLIN)))


class Client:
    """A client's connection: the socket, the bytes read ahead of use, and whether it left."""

    def __init__(self, sock, stall):
        self.sock, self.stall = sock, stall
        self.buf, self.left, self._action = b"", False, None
        self.unread = False                     # bytes of a request that nobody will read may be on their way

    def on_leave(self, action):
        """What to do as soon as the client is known to have left; at once if it has. None: nothing."""
        self._action = action
        if self.left and action:
            action()

    def leaves(self):
        """Told by the Watcher, or by a send that failed."""
        self.left = True
        if action := self._action:
            action()

    def recv(self, size=4 * SMALL):
        """More of a body; b"" when it closed. Raises BadMessage(408) when it stalls, Gone when it was reset."""
        if not readable(self.sock, self.stall):
            raise BadMessage(f"nothing came for {self.stall:g}s in the middle of a body (-stall)", 408)
        try:
            return self.sock.recv(size)
        except OSError:
            raise Gone from None

    def send(self, data):
        """Raises Gone when it left, or took nothing for `stall` seconds."""
        try:
            self.sock.sendall(data)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                log.info("a client took nothing for %gs (-stall): cut off", self.stall)
                self.reset()
            self.leaves()
            raise Gone from None

    def reset(self):
        """Make the close an RST: the end must not look like one."""
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    def read_head(self):
        """The next head's bytes; None when the client closed, or stayed idle. Raises BadMessage."""
        data, started = self.buf, 0.0
        while (end := data.find(b"\r\n\r\n")) < 0:
            if data:
                self.unread, started = True, started or time.monotonic()
                _still_a_head(data)
                if not readable(self.sock, started + HEAD_SECONDS - time.monotonic()):
                    raise BadMessage(f"the head was not complete within {HEAD_SECONDS:g}s", 408)
            try:
                more = self.sock.recv(SMALL)            # idle: the kernel's limit is -keepalive
            except OSError:
                return None
            if not more:
                if data:
                    raise BadMessage("the head was cut short")
                return None
            self.buf = data = data + more if data else more
        if end > HEAD_BYTES:
            self.unread = True
            raise BadMessage("the head is too large", 414 if data.find(b"\r\n") > HEAD_BYTES else 431)
        self.buf = data[end + 4:]
        return data[:end + 4]


def _still_a_head(data):
    """Refuse early what can't become a head any more: a TLS hello or noise must not wait for a deadline."""
    line, whole, _ = data.partition(b"\r\n")
    if len(data) > HEAD_BYTES:
        raise BadMessage("the head is too large", 431 if whole else 414)
    if NOT_TEXT.search(data) or whole and not REQUEST.match(line + b"\r\n\r\n"):
        raise BadMessage("this is no clean HTTP/1.1 request head")


class Watcher:
    """One thread that learns of every client that leaves: FIN (also a half-close, as nginx and Go take it) or RST.

    A client whose bytes lie unread by the megabyte can't be seen to leave; so bodies are read before waiting.
    """

    def __init__(self):
        self._epoll, self._clients = select.epoll(), {}

    def add(self, client):
        self._clients[client.sock.fileno()] = client
        self._epoll.register(client.sock.fileno(), select.EPOLLRDHUP | select.EPOLLET)

    def remove(self, client):
        """Before the socket is closed: its number may be another client's at once."""
        self._epoll.unregister(client.sock.fileno())
        self._clients.pop(client.sock.fileno(), None)

    def run(self):
        while True:
            for number, _ in self._epoll.poll():
                client = self._clients.get(number)
                with contextlib.suppress(OSError, ValueError):
                    # asked again, since the event may be that of an earlier socket with this number
                    if client and ready(0, (client.sock, select.POLLRDHUP)):
                        client.leaves()


class Spool:
    """A body that waits: in memory, beyond SPOOL_BYTES in a temporary file."""

    def __init__(self):
        self.size, self._parts, self._file = 0, [], None

    def add(self, block):
        self.size += len(block)
        self._parts.append(block)
        if self.size > SPOOL_BYTES:
            try:
                if self._file is None:
                    import tempfile                 # rarely needed, and slow to import
                    self._file = tempfile.TemporaryFile(buffering=0)
                for part in self._parts:
                    self._file.write(part)
                self._parts = []
            except OSError as error:
                raise Refused(507, f"the body cannot be kept while it waits: {error.strerror}; free some disk (TMPDIR)",
                              "insufficient_storage") from None

    def whole(self):
        """All bytes, where they are few; else None."""
        return b"".join(self._parts) if self.size <= SMALL else None

    def blocks(self):
        if self._file:
            self._file.seek(0)
            while block := self._file.read(LARGE // 4):
                yield block
        yield from self._parts

    def close(self):
        if self._file:
            self._file.close()


def body_blocks(client, framing, wait=lambda: True):
    """The sound bytes of a request's body, as they come. wait() is called before each recv: False ends it."""
    while not framing.done:
        if client.buf:
            count = framing.feed(client.buf)
            block, client.buf = client.buf[:count], client.buf[count:]
            if count:
                yield block
                continue
        if not wait():
            return
        more = client.recv()
        if not more:
            raise Gone
        client.buf += more


class Upstream(http.client.HTTPConnection):
    """A connection to an engine. It stays with its client connection: the Watcher shuts it when that client leaves."""

    response_class = Answer

    def __init__(self, engine, stall):
        super().__init__(engine.endpoint.host, engine.endpoint.port)
        self.engine, self.stall, self.idle_since = engine, stall, 0.0

    def connect(self):
        try:
            self.sock = socket.create_connection((self.host, self.port), CONNECT_SECONDS)
        except OSError as error:
            raise Refused(502, f"{self.engine.title} cannot be reached at {self.engine.endpoint}: "
                               f"{error.strerror or error}; is it running?", "engine_error") from None
        if self.sock.getsockname() == self.sock.getpeername():      # in the ephemeral range a connect can meet itself
            self.close()
            raise Refused(502, f"nothing listens on {self.engine.endpoint}; is it running?", "engine_error")
        bound_socket(self.sock, 0, self.stall)

    def getresponse(self, method, interim):
        return self.response_class(self.sock, method, interim).begin()

    def fits(self, method):
        """Whether the kept connection may carry this: an engine may close it at any moment, and no POST is resent."""
        young = time.monotonic() - self.idle_since < REUSE_SECONDS
        return self.sock is not None and (young or method in READS) and not readable(self.sock, 0)

    def abort(self):
        """Wake whoever waits on it, from any thread."""
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)


class Cut(Exception):
    """The engine's answer ended before its end."""


class Exchange:
    """One request's way to its engine and back. on_left: what a client's leaving leads to instead of the exchange's end
    (a render goes on anyway, and only its connection tells when it ends)."""

    def __init__(self, client, request, forwarded, hold=None, on_left=None):
        self.client, self.request, self.forwarded, self.hold, self.on_left = client, request, forwarded, hold, on_left
        self.status, self.copied, self.upstream = 0, [], None
        self.sent = False                   # the answer's head is on its way to the client
        self.keep = request.keep            # the client's connection may go on
        self.expired = False                # the hold's job_bound is over
        self._clients_fault = False         # what was wrong came from the client
        self._ends_bare = False             # the client takes the connection's end for the answer's
        self._slow_since, self._slow_bytes = 0.0, 0

    def run(self, upstream, spool):
        """Carry it out; True if upstream may be used again. Raises Gone, Refused, BadMessage; Cut when the answer,
        already on its way, broke off."""
        self.upstream = upstream
        if self.hold:
            self.hold.on_revoke = upstream.abort
        self.client.on_leave(self.on_left or upstream.abort)
        try:
            answer = self._ask(spool)
            return self._upgrade(answer) if answer.status == 101 else self._deliver(answer)
        except (OSError, Cut, BadMessage) as error:
            raise self._failure(error) from None
        finally:
            self.client.on_leave(None)

    def expire(self):
        self.expired = True
        self.upstream.abort()

    def _failure(self, error):
        """What an exchange that broke raises, from what is known of why."""
        title, why = self.upstream.engine.title, str(error) or type(error).__name__
        if self._clients_fault:
            return error
        if self.expired:
            failure = Refused(504, "the render took longer than -render-wait; it was stopped", "timeout")
        elif self.hold and self.hold.revoked:
            failure = Refused(503, f"the hold on the card was taken away: {self.hold.revoked}", "released", 1)
        elif self.client.left:
            return Gone()
        else:
            failure = Refused(502, f"{title}: {why}", "engine_error")
        if self.sent:
            log.warning("an answer of %s to %s broke off: %s", title, self.request.method, failure)
            if self._ends_bare:
                self.client.reset()
            return Cut()
        return failure

    # -- to the engine --

    def _ask(self, spool):
        upstream, request = self.upstream, self.request
        head = request.upstream_head(self.forwarded, upstream.engine.fresh)
        whole = spool.whole() if request.body.done else None
        for again in (True, False):
            kept = upstream.sock is not None
            if not kept:
                upstream.connect()
            if self.client.left and not self.on_left:
                raise Gone
            try:
                upstream.send(head if whole is None else head + whole)
                if whole is None:
                    self._upload(spool)
                return upstream.getresponse(request.method, self._interim)
            except OSError:                 # it had closed while idle: a GET may be sent again, once
                if not (again and kept and request.method in READS) or self.client.left:
                    raise
                upstream.close()

    def _interim(self, head):
        if self.request.minor:
            self._to_client(head)

    def _upload(self, spool):
        """Send the body, watching for an answer that comes before its end."""
        self._slow_since = time.monotonic()
        early = not all(map(self._push, spool.blocks()))
        if not early and not self.request.body.done:
            try:
                for block in body_blocks(self.client, self.request.body, self._wait_for_body):
                    self._slow_bytes += len(block)
                    if not self._push(block):
                        break
            except (Gone, BadMessage):
                self._clients_fault, self.on_left = True, None      # no whole request reached the engine
                raise
            early = not self.request.body.done
        if early:
            self.keep, self.client.unread = False, True

    def _push(self, block):
        """Send all of it; False as soon as the engine answers, or reads no further."""
        view, sock = memoryview(block), self.upstream.sock
        if readable(sock, 0):
            return False
        while view:
            try:
                view = view[sock.send(view, socket.MSG_DONTWAIT):]
            except BlockingIOError:
                events = ready(self.client.stall, (sock, select.POLLIN | select.POLLOUT))
                if not events:
                    raise Refused(504, f"{self.upstream.engine.title} took nothing of the body for"
                                       f" {self.client.stall:g}s", "timeout") from None
                if events[sock.fileno()] & select.POLLIN:
                    return False
            except OSError:
                return False                # its answer may be there to read
        return True

    def _wait_for_body(self):
        """Wait for the client's next bytes; False when the engine has something to say first."""
        seconds = min(self.client.stall, SLOW_SECONDS) if self.hold else self.client.stall
        events = ready(seconds, (self.client.sock, select.POLLIN), (self.upstream.sock, select.POLLIN))
        if self.hold and time.monotonic() - self._slow_since >= SLOW_SECONDS:
            if self._slow_bytes < SLOW_BYTES:
                raise BadMessage(f"the body came with less than {SLOW_BYTES} bytes in {SLOW_SECONDS:g}s, while it held"
                                 " the card", 408)
            self._slow_since, self._slow_bytes = time.monotonic(), 0
        return self.upstream.sock.fileno() not in events        # without any: recv tells that it stalled

    # -- to the client --

    def _to_client(self, data):
        """A client that left gets nothing more; whether that ends the exchange depends on on_left."""
        if not (self.client.left and self.on_left):
            try:
                self.client.send(data)
            except Gone:
                if not self.on_left:
                    raise

    def _head(self, answer):
        chunked = isinstance(answer.body, Chunked)
        lines = [b"HTTP/1.1 ", answer.line, b"\r\n", answer.fields]
        if chunked and self.request.minor:
            lines.append(b"Transfer-Encoding: chunked\r\n")
        self._ends_bare = isinstance(answer.body, UntilEnd) or chunked and not self.request.minor
        self.keep = self.keep and not self._ends_bare
        lines.append(b"\r\n" if self.keep else b"Connection: close\r\n\r\n")
        return b"".join(lines)

    def _deliver(self, answer):
        self.status, body, data, copied = answer.status, answer.body, answer.rest, 0
        pending = self._head(answer)                # the head goes with the first bytes of the body, or before a wait
        chunked = isinstance(body, Chunked)
        bare = chunked and not self.request.minor   # HTTP/1.0 knows no chunks
        looks = self.on_left and self.status in (200, 202)
        while True:
            payload = [] if chunked and (bare or looks) else None
            count = body.feed(data, payload) if payload is not None else body.feed(data)
            block, data = data[:count], data[count:]
            if looks and copied <= COPY_BYTES:
                self.copied += [block] if payload is None else payload
                copied += count
            if bare:
                block = b"".join(payload)
            if pending or block:
                self.sent = True
                self._to_client(pending + block)
                pending = b""
            if body.done:
                return not data and not answer.closes
            if not (data or looks) and isinstance(body, Sized) and body.left > LARGE:
                self._pump(body)
            more = self.upstream.sock.recv(SMALL)
            if not more:
                if isinstance(body, UntilEnd) and not self._broken():
                    return False
                raise Cut("its answer was cut short")
            data = data + more if data else more

    def _broken(self):
        """Whether an end of the connection was brought about from this side."""
        return self.expired or self.client.left or bool(self.hold and self.hold.revoked)

    def _pump(self, body):
        """The bulk of a long body of known length, through one buffer."""
        view, sock = memoryview(bytearray(LARGE)), self.upstream.sock
        while body.left > LARGE:
            count = sock.recv_into(view)
            if not count:
                raise Cut("its answer was cut short")
            self._to_client(view[:body.feed(view[:count])])

    def _upgrade(self, answer):
        if not self.request.upgrade or b"upgrade" not in answer.named:
            raise BadMessage("the engine switched protocols unasked")
        self.status, self.keep, self.sent = 101, False, True
        self.client.on_leave(None)                  # a half-close is carried over
        self.client.send(b"HTTP/1.1 " + answer.line + b"\r\n" + answer.fields +
                         b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + answer.rest)
        tunnel(self.client.sock, self.upstream.sock, self.client.buf)
        return False


def tunnel(client, engine, first=b""):
    """Copy both ways until both have ended; a half-close is carried over, a reset resets both. No idle limit."""
    ways = {client.fileno(): (client, engine), engine.fileno(): (engine, client)}
    waiting = {client.fileno(): first, engine.fileno(): b""}    # read from this one, not yet taken by its peer
    ended, shut = set(), set()
    try:
        while len(shut) < 2:
            wants = [(source, (0 if waiting[number] or number in ended else select.POLLIN) |
                      (select.POLLOUT if waiting[sink.fileno()] else 0)) for number, (source, sink) in ways.items()]
            ready(1e6, *((sock, events) for sock, events in wants if events))
            for number, (source, sink) in ways.items():
                with contextlib.suppress(BlockingIOError):
                    if not waiting[number] and number not in ended:
                        waiting[number] = source.recv(SMALL, socket.MSG_DONTWAIT)
                        ended.update(() if waiting[number] else (number,))
                    if waiting[number]:
                        waiting[number] = waiting[number][sink.send(waiting[number], socket.MSG_DONTWAIT):]
                if number in ended and number not in shut and not waiting[number]:
                    shut.add(number)
                    sink.shutdown(socket.SHUT_WR)
    except OSError:
        for sock in (client, engine):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


# ----- Eyes ---------------------------------------------------------------------------------------------------

class LogFormat(logging.Formatter):
    """One line a record, whatever stands in it: text, or JSON."""

    def __init__(self, as_json):
        super().__init__()
        self._as_json = as_json

    def format(self, record):
        message, fields = record.getMessage(), getattr(record, "fields", {})
        if record.exc_info:
            message += " | " + self.formatException(record.exc_info)
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        if self._as_json:
            return json.dumps({"time": at, "level": record.levelname, "msg": message, **fields})
        words = "".join(f" {key}={json.dumps(value) if isinstance(value, (str, list)) else value}"
                        for key, value in fields.items())
        return re.sub(r"[\x00-\x1f\x7f]+", " ", f"{at} {record.levelname:7} {message}{words}")


def start_log(level, form):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormat(form == "json"))
    logging.raiseExceptions = False             # a full disk must not end anything
    log.addHandler(handler)
    log.setLevel(level.upper())


class Histogram:
    """Counts by upper bound in seconds, as Prometheus wants them: cumulative when shown."""

    BOUNDS = (0.005, 0.025, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

    def __init__(self):
        self.counts, self.sum = [0] * (len(self.BOUNDS) + 1), 0.0

    def add(self, seconds):
        self.counts[bisect.bisect_left(self.BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name, label):
        """label: such as kind="llm", or nothing."""
        counts, braced = list(itertools.accumulate(self.counts)), f"{{{label}}}" if label else ""
        return [f'{name}_bucket{{{label}{"," if label else ""}le="{bound}"}} {count}'
                for bound, count in zip((*self.BOUNDS, "+Inf"), counts)] + [
                    f"{name}_sum{braced} {self.sum:.6f}", f"{name}_count{braced} {counts[-1]}"]


class Eyes:
    """What people and programs look at. The state itself is asked for at that moment, never kept beside its owner."""

    def __init__(self, card=None, vram=None, engines=None):
        self.card, self.vram, self.engines = card, vram, engines        # set by build()
        self.started, self._lock = time.monotonic(), threading.Lock()
        self._requests, self._moves, self._jobs = collections.Counter(), collections.Counter(), 0
        self._spans = collections.defaultdict(Histogram)                # (name, label) -> Histogram

    def tell(self, event, **fields):
        """Told by the card, under its lock, at every transition."""
        if event == "grant":
            self._jobs += fields["kind"] == IMAGE
            self._spans["gpu_turnstile_lock_wait_seconds", f'kind="{fields["kind"]}"'].add(fields["waited"])
        if event == "handover":
            for phase in ("drain", "evict", "vram", "start"):
                self._spans["stadi_handover_seconds", f'phase="{phase}"'].add(fields[f"{phase}_ms"] / 1000)
            if fields["from"]:
                self._spans["gpu_turnstile_unload_seconds", ""].add((fields["evict_ms"] + fields["vram_ms"]) / 1000)
            self._moves[fields["from"] or "none", fields["to"] or "none"] += 1
            shown = {key: value for key, value in fields.items() if value not in (None, [], "") and key != "at"}
            log.info("hand-over", extra={"fields": shown})
        elif log.isEnabledFor(logging.DEBUG):
            log.debug(event, extra={"fields": {key: round(value, 3) if isinstance(value, float) else value
                                               for key, value in fields.items()}})

    def count(self, front, kind, status):
        with self._lock:
            self._requests[front, kind, status] += 1

    def status(self):
        """The whole state as a dict for JSON; never waits for an engine, and for the card's meter a moment at most."""
        card, sd, meter = self.card.snapshot(), self.engines.get("sd"), self.vram.meter
        reading = meter.read(0.25) or meter.last
        resident = {name: card["resident"].get(name) for name in self.engines}
        resident.update({"sd": sd.up} if sd else {})
        return {
            "version": VERSION, "uptime_s": time.monotonic() - self.started, **card, "resident": resident,
            "vram": {"used": reading and reading.used, "total": reading and reading.total, "floor": self.vram.floor,
                     "source": meter.source, "error": meter.error or None},
            "sd_child_up": bool(sd and sd.up), "sd": sd and sd.describe(),
            "engines": {name: engine.describe() for name, engine in self.engines.items()},
            "given_up": list(getattr(self.engines.get("comfy"), "given_up", ()))}

    def health(self):
        card = self.card.snapshot()
        pending = bool(card["in_flight"][IMAGE] or any(row["kind"] == IMAGE for row in card["waiting"]))
        return {"state": card["state"], "llm_inflight": card["in_flight"][LLM], "image_pending": pending}

    def metrics(self):
        """Prometheus' text format 0.0.4."""
        status = self.status()
        waiting = collections.Counter(row["kind"] for row in status["waiting"])
        holder, vram = (status["holder"] or {}).get("engine"), status["vram"]
        with self._lock:
            requests = list(self._requests.items())
        families = (
            ("gpu_turnstile_state", "gauge", "1 for the state that the card is in",
             [(f'{{state="{state}"}}', int(status["state"] == state)) for state in ("idle", LLM, IMAGE)]),
            ("gpu_turnstile_llm_inflight", "gauge", "LLM requests that hold the card", [("", status["in_flight"][LLM])]),
            ("gpu_turnstile_image_jobs_total", "counter", "image jobs that were given the card", [("", self._jobs)]),
            ("gpu_turnstile_lock_wait_seconds", "histogram", "from a request's arrival to its hold", ()),
            ("gpu_turnstile_unload_seconds", "histogram", "from an eviction's start to the VRAM's return", ()),
            ("stadi_build_info", "gauge", "the version that runs", [(f'{{version="{VERSION}"}}', 1)]),
            ("stadi_holder", "gauge", "1 for the engine that holds the card",
             [(f'{{engine="{name}"}}', int(name == holder)) for name in self.engines]),
            ("stadi_waiting", "gauge", "requests that wait for the card",
             [(f'{{kind="{kind}"}}', waiting[kind]) for kind in (LLM, IMAGE)]),
            ("stadi_handovers_total", "counter", "hand-overs of the card",
             [(f'{{from="{gone}",to="{to}"}}', count) for (gone, to), count in list(self._moves.items())]),
            ("stadi_handover_seconds", "histogram", "one phase of a hand-over", ()),
            ("stadi_vram_used_bytes", "gauge", "VRAM in use", [("", vram["used"])]),
            ("stadi_vram_total_bytes", "gauge", "the card's VRAM", [("", vram["total"])]),
            ("stadi_sd_child_up", "gauge", "whether sd-server is alive", [("", int(status["sd_child_up"]))]),
            ("stadi_requests_total", "counter", "requests answered, by front, class and status",
             [(f'{{front="{front}",class="{kind}",code="{code}"}}', count) for (front, kind, code), count in requests]))
        lines = []
        for name, kind, text, samples in families:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{labels} {value}" for labels, value in samples if value is not None]
            for (span, label), histogram in list(self._spans.items()):
                lines += histogram.lines(name, label) if span == name else ()
        return "\n".join(lines) + "\n"


# ----- Front --------------------------------------------------------------------------------------------------

OWN_NAMES = (".localhost", ".local", ".internal", ".lan", ".home.arpa")     # no stranger can own these
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

@functools.lru_cache(1024)
def own_name(host, allowed):
    """Whether a Host is one that no stranger can make a browser send (DNS rebinding)."""
    name = re.sub(r":\d+$", "", host.lower()).strip("[]").rstrip(".")
    return is_ip(name) or "." not in name or name.endswith(OWN_NAMES) or name in allowed

def own_origin(origin, host, allowed):
    """Whether a page of this origin may use stadi: the Host's own, this machine's, or one that a setting names."""
    with contextlib.suppress(ValueError):
        parts, there = urllib.parse.urlsplit(origin), urllib.parse.urlsplit(f"//{host}")
        usual = {"http": 80, "https": 443}.get(parts.scheme)
        if origin in allowed or usual and parts.hostname and (
                Endpoint(parts.hostname, 0).loopback or parts.hostname.endswith(".localhost")
                or (parts.hostname, parts.port or usual) == (there.hostname, there.port or usual)):
            return True
    return False


class Front(NamedTuple):
    """One listening address: its routes, its guard, the shape of its errors."""
    name: str
    table: Table
    strict: bool                # stadi is the only guard of these engines: Host, Origin, no body on a GET
    limits: dict                # kind -> seconds that a request waits for the card
    gates: tuple = ()           # paths whose errors are read as ComfyUI's


class Server(http.server.ThreadingHTTPServer):
    """Accepts; a thread for each connection. Never ends: main leaves the process."""

    daemon_threads, block_on_close, request_queue_size = True, False, 1024

    def __init__(self, endpoint, front, world):
        self.front, self.world, self.open = front, world, 0     # world: settings, card, engines, eyes, watcher
        self.most = max(16, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 64) // 3)
        self.address_family = socket.AF_INET if "." in endpoint.host or not socket.has_ipv6 else socket.AF_INET6
        super().__init__(tuple(endpoint), Handler)

    def server_bind(self):
        """Without the name look-up of the original; an empty host is every address of both families."""
        if self.address_family == socket.AF_INET6 and not self.server_address[0]:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def get_request(self):
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                log.error("no connection can be accepted: %s; raise the limit of open files (ulimit -n)", error.strerror)
                time.sleep(0.2)                         # the socket stays readable: no spin
            raise

    def process_request(self, request, client_address):
        try:
            if self.open >= self.most:
                raise RuntimeError(f"more than {self.most} connections (ulimit -n)")
            super().process_request(request, client_address)
        except RuntimeError as error:
            log.error("a connection was refused: %s", error)
            self.close_request(request)

    def process_request_thread(self, request, client_address):
        self.open += 1                                  # a count for a cap: off by a few does no harm
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.open -= 1

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a connection failed")

    def shutdown_request(self, request):
        self.close_request(request)                     # the handler has shut it down in its own way


class Handler(http.server.BaseHTTPRequestHandler):
    """One client connection, request after request: from a route's class to card, relay or answer."""

    def setup(self):
        self.world, self.front, self.upstream = self.server.world, self.server.front, None
        settings = self.world.settings
        self.client = Client(self.request, settings.stall)
        bound_socket(self.request, settings.keepalive, settings.stall)
        address = self.client_address[0].removeprefix("::ffff:")
        self.forwarded = f"X-Forwarded-For: {address}\r\nX-Forwarded-Proto: http\r\n".encode()
        self.world.watcher.add(self.client)

    def finish(self):
        """Close so that the client gets what was sent: what it still sends is drained for a moment."""
        self.world.watcher.remove(self.client)
        if self.upstream:
            self.upstream.close()
        if self.client.unread:
            with contextlib.suppress(OSError):
                self.request.shutdown(socket.SHUT_WR)
                end = time.monotonic() + LINGER_SECONDS
                while readable(self.request, end - time.monotonic()) and self.request.recv(LARGE):
                    pass

    def handle_one_request(self):
        self.close_connection, self.route_kind, request = True, "none", None
        try:
            head = self.client.read_head()
            if head is None:
                return
            self.is_head, self.client.unread = head.startswith(b"HEAD "), True
            request = Request(head)
            self.client.unread = not request.body.done
            self.close_connection = not self._serve(request)
        except (Gone, Cut):
            pass
        except BadMessage as error:
            self.is_head = self.is_head if self.client.unread and request else self.client.buf.startswith(b"HEAD ")
            self._refuse(request, Refused(error.status, str(error), "invalid_request_error"))
        except Refused as error:
            self.close_connection = not self._refuse(request, error)
        except Exception:
            log.exception("a request failed")
            self._refuse(request, Refused(500, "stadi failed on this request; its log has the reason", "server_error"))

    # -- answers of stadi's own --

    def _refuse(self, request, error):
        """Write an error in the shape that clients of this front read. True if the connection may go on."""
        text, path = str(error), cleaned(decoded(request.target.partition("?")[0])) if request else ""
        if self.front.name == "comfy" and path in self.front.gates:
            body = {"error": {"type": error.kind, "message": text, "details": "", "extra_info": {}}, "node_errors": {}}
        elif self.front.name == "ollama" and path.startswith("/api/"):
            body = {"error": text}
        else:
            body = {"error": {"message": text, "type": error.kind, "code": error.status}}
        more = f"Retry-After: {error.retry_after or 5}\r\n" if error.status == 503 else ""
        return self._answer(request, error.status, body, more)

    def _answer(self, request, status, body, more="", kind="application/json"):
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        keep = bool(request and request.keep and request.body.done and status not in (400, 408)
                    and not self.world.card.closed)
        self.world.eyes.count(self.front.name, self.route_kind, status)
        if request:
            self.client.unread = not request.body.done
        head = (f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(content)}\r\n{more}").encode() + (b"\r\n" if keep else b"Connection: close\r\n\r\n")
        self.client.send(head if self.is_head else head + content)
        return keep

    # -- requests --

    def _serve(self, request):
        """Answer one request; True if the connection may go on."""
        route = self.front.table.classify(request.method, request.target)
        self.route_kind = route.kind
        self._guard(request, route)
        if route.kind == OWN:
            return self._own(request, route)
        engine = self.world.engines.get(route.engine)
        if engine is None and request.method == "OPTIONS":
            return self._preflight(request)
        if engine is None:
            what, flag = ("sd-server", "sd") if route.engine == "sd" else ("router", "llm")
            raise Refused(404, f"there is no {what} behind this stadi (-{flag} off)", "not_found_error")
        return getattr(self, f"_{route.kind}")(request, route, engine)

    def _guard(self, request, route):
        """The router and sd-server have no defence of their own, and reflect any Origin; Ollama and ComfyUI defend
        themselves. stadi's own routes are guarded everywhere; health checks come through other proxies."""
        strict, own, origin = self.front.strict, route.kind == OWN, request.one(b"origin")
        if strict and request.method in READS and not request.body.done:
            raise BadMessage(f"a {request.method} with a body: a form in it could name a model")
        settings, named = self.world.settings, False
        if (strict or own) and not (own and route.path in ("/healthz", "/metrics")):
            if not own_name(request.host, settings.allow_host):
                raise Refused(403, f"Host {request.host!r} is not one of this stadi's names; if it is, set -allow-host"
                                   " (STADI_ALLOW_HOST)", "forbidden")
        changes = request.method not in ("GET", "HEAD", "OPTIONS")
        if not (own and changes or strict and (request.upgrade or changes or route.kind in (TAKE, STEER))):
            return
        if origin is not None:
            origin = origin.decode("latin-1")
            named = origin in settings.allow_origin
            if not own_origin(origin, request.host, settings.allow_origin):
                raise Refused(403, f"pages of {origin!r} may not use this stadi; if they may, set -allow-origin"
                                   " (STADI_ALLOW_ORIGIN)", "forbidden")
        if request.one(b"sec-fetch-site") == b"cross-site" and not named:
            raise Refused(403, "a page of another site may not use this stadi; if it may, set -allow-origin"
                               " (STADI_ALLOW_ORIGIN) to its origin", "forbidden")

    def _preflight(self, request):
        """Without a router to ask: a browser's question before a request, answered for the origins that may."""
        origin = (request.one(b"origin") or b"").decode("latin-1")
        allowed = own_origin(origin, request.host, self.world.settings.allow_origin)
        return self._answer(request, 200, {}, f"Access-Control-Allow-Origin: {origin}\r\nVary: Origin\r\n"
                            "Access-Control-Allow-Methods: GET, POST\r\nAccess-Control-Allow-Headers: Content-Type,"
                            " Authorization\r\n" if allowed else "")

    def _own(self, request, route):
        eyes = self.world.eyes
        if request.method == "POST" and route.path.endswith("/release"):
            for _ in body_blocks(self.client, request.body):
                pass
            return self._release(request)
        if request.method not in READS:
            raise Refused(405, f"{route.path} is read with GET", "invalid_request_error")
        if route.path == "/metrics":
            return self._answer(request, 200, eyes.metrics(), kind="text/plain; version=0.0.4; charset=utf-8")
        return self._answer(request, 200, eyes.health() if route.path == "/healthz" else eyes.status())

    def _release(self, request):
        """Let go of a hold that is stuck: the one that id names (its number, or its job), else the oldest image hold."""
        card, wanted = self.world.card, query_values(request.target.partition("?")[2], "id")
        released, held = [], card.holds()
        for hold in held if wanted else [hold for hold in held if hold.engine.kind == IMAGE][:1]:
            if (not wanted or wanted[0] in (str(hold.id), hold.job)) and card.revoke(hold, "released by hand"):
                log.warning("released by hand: %s (%s)", hold.what, hold.job or "no job")
                hold.engine.give_up(hold.job)
                released.append({"id": hold.id, "engine": hold.engine.name, "what": hold.what, "job": hold.job})
        return self._answer(request, 200, {"released": released})

    def _continue(self, request):
        """Nothing can refuse the body any more: let it come."""
        if request.expects and not request.body.done and not self.client.buf:
            self.client.send(CONTINUE)

    def _pass(self, request, route, engine, hold=None, spool=None):
        if not spool:
            self._continue(request)
        return self._run(Exchange(self.client, request, self.forwarded, hold), engine, spool or Spool())

    def _steer(self, request, route, engine):
        """Steering a completion that runs must not queue behind it."""
        return (self._pass if self.world.card.has(engine) else self._take)(request, route, engine)

    def _watch(self, request, route, engine):
        """Looking may neither turn the card round nor keep anything there."""
        if engine.kind == LLM:
            hold = self.world.card.watch(engine, f"{request.method} {route.path}")
            try:
                if hold and engine.loaded(query_values(request.target.partition("?")[2], "model")):
                    return self._pass(request, route, engine, hold)
            finally:
                if hold:
                    self.world.card.release(hold)
            raise Refused(503, "llm is not loaded")
        job = re.fullmatch(r"/sdcpp/v1/jobs/([^/]+)", route.path)
        if job and request.method in READS and (kept := engine.results.get(job[1])):
            return self._answer(request, 200, kept.decode("utf-8", "replace"))
        try:
            if engine.serving:
                return self._pass(request, route, engine)
        except Refused:
            if engine.serving:
                raise
        raise Refused(503, "sd is not loaded")

    def _take(self, request, route, engine):
        """The body first: a client can't be seen to leave while its bytes lie unread. A long one streams straight
        through when the card is free for it."""
        card, spool, what = self.world.card, Spool(), f"{request.method} {route.path}"
        try:
            self._continue(request)
            for block in body_blocks(self.client, request.body):
                spool.add(block)
                if spool.size >= SPOOL_BYTES and card.free_for(engine):
                    break
            if request.body.done and engine.spares(route.path, request, spool.whole()):
                return self._pass(request, route, engine, None, spool)
            joins = route.path in engine.jobs
            hold = card.acquire(engine, what, self.front.limits[engine.kind], joins, self.client.on_leave)
            return self._held(request, route, hold, spool, joins)
        finally:
            spool.close()

    def _held(self, request, route, hold, spool, joins):
        """Relay under a hold, which ends with the answer, or with the job that the answer names."""
        card, engine, on_left = self.world.card, hold.engine, None
        if engine.kind == IMAGE:            # an asynchronous job is wanted whether or not its client stays
            on_left = (lambda: None) if joins else functools.partial(card.reconsider, hold)
        exchange = Exchange(self.client, request, self.forwarded, hold, on_left)
        timer = threading.Timer(engine.job_bound, exchange.expire) if engine.job_bound else None
        try:
            if timer:
                timer.daemon = True
                timer.start()
            return self._run(exchange, engine, spool)
        finally:
            if timer:
                timer.cancel()
            if exchange.expired:
                engine.evict()
            hold.job = exchange.status and engine.job_of(route.path, exchange.status, b"".join(exchange.copied)) or None
            if hold.job and not exchange.expired and not hold.revoked:
                follower = threading.Thread(target=follow, args=(card, hold), name="follower", daemon=True)
                try:
                    follower.start()
                except RuntimeError:                    # no threads left: this one will do
                    follow(card, hold)
            else:
                card.release(hold)

    def _run(self, exchange, engine, spool):
        """Carry out an exchange over the kept connection where it fits, else over a fresh one. True if the client's
        connection may go on."""
        kept, self.upstream = self.upstream, None
        if kept and (kept.engine is not engine or not kept.fits(exchange.request.method)):
            kept.close()
            kept = None
        upstream = kept or Upstream(engine, self.client.stall)
        try:
            if exchange.run(upstream, spool) and not engine.fresh and exchange.keep:
                upstream.idle_since, self.upstream = time.monotonic(), upstream
        finally:
            if self.upstream is not upstream:
                upstream.close()
            if exchange.status:
                self.world.eyes.count(self.front.name, self.route_kind, exchange.status)
        return exchange.keep and not self.world.card.closed


# ----- main ---------------------------------------------------------------------------------------------------

MODEL_FLAGS = ("-m", "--model", "--diffusion-model", "--high-noise-diffusion-model", "--llm", "--llm_vision",
               "--clip_l", "--clip_g", "--clip_vision", "--t5xxl", "--vae", "--tae", "--taesd", "--control-net")

def check(settings, environ):
    """-check: look at the world with these settings. Prints a line each; returns the exit code."""
    found = []
    for level, text in findings(settings, environ):
        print(f"{level:7} {text}", flush=True)
        found.append(level)
    return int("error" in found)

def findings(settings, environ):
    """(ok, warning or error; what was found and what to do). A warning may be mended by waiting."""
    log.disabled = True                                 # what an engine lacks is said here
    yield from sd_findings(settings) if settings.sd else ()
    yield from router_findings(settings) if settings.llm else ()
    comfy = settings.comfy and Comfy(settings.comfy, 0, 0, None)
    for engine in (settings.ollama and Ollama(settings.ollama, 0), comfy):
        if engine:
            engine.probe()
            yield ("warning", f"{engine.title}, {SETTINGS[engine.name]}: {engine.trouble}") if engine.trouble else (
                "ok", f"{engine.title} answers at http://{engine.endpoint}")
    try:
        meter = find_meter(settings, environ, comfy and comfy.reading)
        reading = meter.read()
        yield ("ok", f"VRAM: {reading.used / GIB:.1f} GiB used, read by {meter.source}") if reading else (
            "warning", "VRAM cannot be read" + (f": {meter.error}" if meter.error else
                       " here: only exits and unloads are waited for; give -vram-cmd if a command can tell"))
    except Usage as error:
        yield "error", str(error)
    for flag in ("listen", "sd", "listen-ollama", "listen-comfy"):
        endpoint = getattr(settings, flag.replace("-", "_"))
        inodes = endpoint and listeners(endpoint.port)
        if inodes:
            own = flag == "sd" and os.path.exists(record_file(settings.sd_log_dir, endpoint.port))
            yield ("warning" if own else "error"), f"port {endpoint.port} (-{flag}) is held by {who_listens(inodes)}" + (
                ", left behind by stadi: the next start ends it" if own else "; end it, or choose another port")
        elif endpoint:
            yield "ok", f"port {endpoint.port} (-{flag}) is free"

def sd_program(settings):
    """(path, "") of the sd-server program, or (None, what is wrong)."""
    path, setting = shutil.which(settings.sd_bin), SETTINGS["sd-bin"]
    if path:
        return path, ""
    if os.path.isdir(settings.sd_bin):
        return None, f"{setting}: {settings.sd_bin} is a folder; name the program in it"
    if os.path.exists(settings.sd_bin):
        return None, f"{setting}: {settings.sd_bin} cannot be executed; chmod +x, or name the program"
    where = "there" if "/" in settings.sd_bin else "on PATH"
    return None, f"{setting}: {settings.sd_bin!r} is not {where}; name sd-server's path, or -sd off"

def sd_findings(settings):
    program, trouble = sd_program(settings)
    yield ("error", trouble) if trouble else ("ok", f"sd-server: {program}")
    for flag, value in zip(settings.sd_args, settings.sd_args[1:]):
        if flag in MODEL_FLAGS:
            wrong = "" if os.path.isfile(value) else (
                ": is a folder" if os.path.isdir(value) else f": no such file in {os.getcwd()}; write the full path"
                if not value.startswith("/") else ": no such file")
            yield ("error", f"model {flag} {value}{wrong} (-sd-args)") if wrong else ("ok", f"model {flag} {value}")
    warnings = list(sd_warnings(settings))
    yield from (("warning", text) for text in warnings)
    if not warnings:
        yield "ok", f"-sd-args agree with -sd (port {settings.sd.port})"
    folder = settings.sd_log_dir
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        yield "error", f"{SETTINGS['sd-log-dir']}: {folder} is no folder that can be written"

def sd_warnings(settings):
    """What in -sd-args will not do what its writer thinks."""
    words = settings.sd_args
    port = next((value for flag, value in zip(words, words[1:]) if flag == "--listen-port"), "1234")
    if port != str(settings.sd.port):
        yield (f"-sd-args: sd-server will listen on port {port}, but -sd says {settings.sd.port}; write"
               f" --listen-port {settings.sd.port} into -sd-args")
    if any(word.partition("=")[0] == "--params-backend" for word in words):
        yield ("-sd-args: --params-backend disables --auto-fit, which tiles a VAE decode that is too large for the card;"
               " leave it out (--backend is safe)")
    if not {"-m", "--model", "--diffusion-model"} & set(words):
        yield "-sd-args: no model in it; write -m /path/to/model, or --diffusion-model"

def router_findings(settings):
    router = Router(settings.llm, settings.llm_key, 0, 0)
    try:
        models = router.models()
        yield "ok", f"router at http://{settings.llm}: {len(models)} models"
        loaded = next((name for name, status in models.items() if status == "loaded"), None)
        if loaded is None:
            yield "ok", "whether the router has /slots shows only while a model is loaded"
        elif router.slots(loaded)[0] == 501:
            yield "warning", "the router has no /slots (--no-slots): a generation that outlives its client is not seen"
        else:
            yield "ok", "the router has /slots"
    except Trouble as error:
        yield ("error" if error.answered else "warning"), f"router at http://{settings.llm} (-llm): {error}"

def build(settings, environ):
    """The world: engines, card and eyes, wired. Raises Usage where it cannot work."""
    engines, eyes = {}, Eyes()
    if settings.llm:
        engines["llama"] = Router(settings.llm, settings.llm_key, settings.busy_wait, settings.vram_wait)
    if settings.sd:
        program, trouble = sd_program(settings)
        if trouble:
            raise Usage(trouble)
        engines["sd"] = Sd(settings.sd, [program, *settings.sd_args], settings.sd_log_dir, settings.idle,
                           settings.load_wait, settings.render_wait)
    if settings.ollama:
        engines["ollama"] = Ollama(settings.ollama, settings.unload_timeout)
    if settings.comfy:
        engines["comfy"] = Comfy(settings.comfy, settings.comfy_keep, settings.job_timeout, lambda: vram.used())
    meter = find_meter(settings, environ, engines["comfy"].reading if settings.comfy else None)
    vram = Vram(meter, settings.free_gib, settings.vram_wait)
    card = Card(engines.values(), vram, tell=eyes.tell)
    eyes.card, eyes.vram, eyes.engines = card, vram, engines
    if settings.warm_model and settings.ollama:
        card.warm = engines["ollama"], lambda hold: engines["ollama"].warm(card, hold, settings.warm_model)
    return types.SimpleNamespace(settings=settings, engines=engines, card=card, eyes=eyes, watcher=Watcher())

def listen(world):
    """The servers of all fronts that are on. Raises Usage where a port is taken."""
    settings, servers = world.settings, []
    limits = {LLM: settings.busy_wait, IMAGE: settings.image_wait}
    gates = tuple(f"{prefix}{path}" for prefix in ("", "/api") for path in ("/prompt", *settings.comfy_gate))
    for flag, endpoint, front in (
            ("listen", settings.listen, Front("llama/sd", Table(LLAMA_SD, True), True, limits)),
            ("listen-ollama", settings.ollama and settings.listen_ollama,
             Front("ollama", Table(OLLAMA_TABLE, False), False, {LLM: settings.llm_wait_timeout})),
            ("listen-comfy", settings.comfy and settings.listen_comfy,
             Front("comfy", Table(comfy_table(settings.comfy_gate), False), False, limits, gates))):
        try:
            servers += [Server(endpoint, front, world)] if endpoint else []
        except OSError as error:
            why = {errno.EADDRINUSE: f"is taken by {who_listens(listeners(endpoint.port))}; end it, or choose another port",
                   errno.EADDRNOTAVAIL: "is no address of this machine"}.get(error.errno, error.strerror)
            raise Usage(f"{SETTINGS[flag]}: {endpoint} {why}") from None
    return servers

def serve(settings, environ):
    """Run until a signal. Returns the exit code."""
    world = build(settings, environ)
    sd = world.engines.get("sd")
    if sd:
        end_orphan(settings.sd_log_dir, settings.sd.port)
        for text in sd_warnings(settings):
            log.warning("%s", text)
        if inodes := listeners(settings.sd.port):
            log.warning("port %d (-sd) is held by %s: no picture until it ends", settings.sd.port, who_listens(inodes))
    servers = listen(world)
    # The kernel may hand a signal to any thread, and a main thread that sits in a lock would never learn of it; the
    # wake-up descriptor is written by whichever thread got it.
    signals, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    work = [("mover", world.card.run), ("watcher", world.watcher.run), ("probe", functools.partial(probe, world))]
    work += [(f"front {server.front.name}", functools.partial(server.serve_forever, 3600)) for server in servers]
    for name, target in work:
        threading.Thread(target=target, name=name, daemon=True).start()
    for server in servers:
        log.info("stadi %s answers on http://%s for %s; VRAM by %s", VERSION, Endpoint(*server.server_address[:2]),
                 server.front.name, world.eyes.vram.meter.source)
    log.info("ending: %s", signal.Signals(signals.recv(1)[0]).name)
    threading.Thread(target=end, args=(world, wake), name="end", daemon=True).start()
    if signals.recv(1)[0] and sd and sd.child:          # a second signal forces; 0 is the end of end()
        sd.child.stop(0, 1.0)
    return 0

def end(world, wake):
    """Refuse new requests, let those in flight end for -grace, stop the child; then wake main."""
    world.card.close(Refused(503, "stadi is ending", "shutting_down", 5), world.settings.grace)
    sd = world.engines.get("sd")
    if sd and not sd.close():
        log.error("sd-server (pid %d) does not end", sd.child.pid)
    wake.send(b"\0")

def probe(world):
    """Ask once which engines are there: they may come up later, so it is only said."""
    for engine in world.engines.values():
        engine.probe()

def main(argv, environ):
    try:
        settings = read_settings(argv, environ)
        if settings.h or settings.version:
            print(usage() if settings.h else f"stadi {VERSION}")
            return 0
        complete(settings, environ)
        if settings.check:
            return check(settings, environ)
        start_log(settings.log_level, settings.log_format)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))
        sys.setswitchinterval(0.0002)           # measured: 15 to 20 % more requests than with the default's 5 ms
        return serve(settings, environ)
    except Usage as error:
        print(f"stadi: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)                              # threads that wait for clients and engines hold nothing any more
