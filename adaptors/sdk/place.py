"""Where the controller of this job is, and how a rank proves to it that it belongs to the job.

ttprun, torchrun              what the controller has published in the job's store; the address that the framework
                              gives to tft_start_processor is not needed
MindCluster (MINDX_TASK_ID)   that address, and the keys in the file of TFT_KEYS
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from mindio_tft_patch.config import Config
from mindio_tft_patch.protocol import endpoint
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.keys import external_endpoint

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("mindio_tft_patch.sdk")


def find_endpoint(config: Config, address: str, port: int) -> Endpoint:
    """Address and keys of the controller.

    Args:
        address: host of the controller, as the framework has given it to tft_start_processor.
        port: its port, as the framework has given it.

    Raises:
        ConfigError: the file of TFT_KEYS cannot be used.
        ControlError: the job's store cannot be reached.
    """
    if config.controller_of_cluster:
        return external_endpoint(replace(config, controller_address=address, port=port))
    found = endpoint.fetch(job_store(config))
    if (found.address, found.port) != (address, port):
        log.info("the controller is at %s port %d, not at %s port %d", found.address, found.port, address, port)
    return found


@functools.lru_cache(maxsize=1)
def job_store(config: Config) -> Store:
    """The job's store, opened once: under a launcher that hosts none, rank 0's connection is the server.

    Raises:
        ControlError: nobody serves it.
    """
    from mindio_tft_patch.adaptors.job_store import open_job_store

    return open_job_store(config)
