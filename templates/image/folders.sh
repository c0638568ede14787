#!/bin/sh
# Makes the folders of an image, and a name for its user. The cache and the work folder may be written by any uid:
# schedulers run images as whoever submitted the job.
set -eu

mkdir -p /opt/envforge/cache/hf /opt/envforge/cache/triton /opt/envforge/cache/inductor /opt/envforge/cache/mpl \
    /opt/envforge/cache/cuda /opt/envforge/cache/xdg /workspace
chgrp -R 0 /opt/envforge/cache /workspace
chmod 1777 /opt/envforge/cache /opt/envforge/cache/* /workspace
# A base may have someone with this uid already; then the name is theirs.
if ! grep -q '^[^:]*:[^:]*:1000:' /etc/passwd; then
    echo 'envforge:x:1000:0:envforge:/workspace:/bin/sh' >>/etc/passwd
fi
