# SPDX-License-Identifier: MIT OR Apache-2.0
"""What several tests use."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile

import gincomm as gin

LIMIT = gin.Deadline(10)
"""The deadline of waits that end well."""


def run(code, *, env=None, timeout=60):
    """Runs Python code in a process of its own, with variables besides those of this one."""
    return start(code, env=env).communicate_within(timeout)


def install_kernels(folder, package, ptx):
    """Makes a wheel of a package with the file `sm_90.ptx`, and installs it by pip in a folder. Returns this folder."""
    info = f"{package}-1.0.dist-info"
    files = {
        f"{package}/__init__.py": "",
        f"{package}/sm_90.ptx": ptx,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: gin\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])
    wheel, installed = folder / f"{package}-1.0-py3-none-any.whl", folder / "installed"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(installed), str(wheel)], check=True, stdin=subprocess.DEVNULL)
    return installed


class Null:
    """A tensor whose address is null. torch has such tensors without elements, and fake ones with elements."""

    TYPES = {"float32": (2, 32), "int32": (0, 32), "int64": (0, 64), "uint16": (1, 16)}

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        class Managed(ctypes.Structure):
            _fields_ = [
                ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("slots", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
            ]

        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        code, bits = self.TYPES[self.dtype]
        managed = Managed(None, (1, 0), len(self.shape), code, bits, 1, ctypes.addressof(shape), None, 0, None, None)
        # Without a deleter nothing tells when the structure is free.
        KEPT.append((shape, managed))
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(managed), b"dltensor", None)


KEPT = []


class Started:
    def __init__(self, code, env):
        variables = {name: value for name, value in os.environ.items() if not name.startswith("GIN_")}
        variables["PYTHONPATH"] = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=variables | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A suite in the background of a shell ignores Ctrl-C, and a child would, too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def read_line(self, stream=None, timeout=60):
        """Reads a line of the process's output, or of another stream of it. A process that prints none is killed."""
        expired = threading.Event()

        def end():
            expired.set()
            self.process.kill()

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            line = (stream or self.process.stdout).readline()
        finally:
            timer.cancel()
        assert not expired.is_set(), f"it printed no line within {timeout} s"
        return line

    def communicate_within(self, timeout=60):
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"it did not end within {timeout} s:\n{out}\n{err}") from None
        assert self.process.returncode == 0, f"status {self.process.returncode}:\n{out}\n{err}"
        return out


def start(code, *, env=None):
    """Starts Python code in a process of its own."""
    return Started(code, env)
