"""torchrun with TaskD's agent: in place of a line edited into torch's own run.py."""

import taskd.python.adaptor.patch  # noqa: F401  (puts TaskD's agent in the place of torch's)
from torch.distributed.run import main

if __name__ == "__main__":
    main()
