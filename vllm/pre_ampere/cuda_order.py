# SPDX-License-Identifier: Apache-2.0
"""Prints the UUID of each card in the CUDA driver's order, one a line.

Run as a program by `devices.driver_order`, never imported: it initialises the driver.
CUDA driver API: cuInit, cuDeviceGetCount, cuDeviceGet, cuDeviceGetUuid.
"""

import ctypes
import sys
import uuid


def main() -> None:
    """Ask the driver, and print; a failed call ends the program with its name and error."""
    driver = ctypes.CDLL("libcuda.so.1")

    def check(status: int, call: str) -> None:
        if status != 0:
            sys.exit(f"{call} answered CUDA error {status}")

    check(driver.cuInit(0), "cuInit")
    count = ctypes.c_int()
    check(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    for ordinal in range(count.value):
        device = ctypes.c_int()
        check(driver.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
        identity = (ctypes.c_ubyte * 16)()
        check(driver.cuDeviceGetUuid(identity, device), "cuDeviceGetUuid")
        print(f"GPU-{uuid.UUID(bytes=bytes(identity))}")


if __name__ == "__main__":
    main()
