#!/bin/bash
# Build Python without the global interpreter lock from Debian's source:
#
#     bash tests/free_threaded_python.sh FOLDER [VERSION]
#
# FOLDER/bin/python3 is the interpreter. This takes five minutes on two cores, and needs Debian and root, for the packages
# that Python is built with. The source comes from the first mirror that this machine's apt knows.
set -eu
prefix=$(realpath -m "${1:?name a folder for the interpreter}")
version=${2:-3.14.7}

# Of the versions that were tested. Another version is built too, after a warning.
case $version in
    3.14.7) checksum=3b48dac8fb59f62eaa67ac83c1eb12bda1b7a08406dd286e252c11a66be27f81 ;;
    *) checksum= ;;
esac

apt-get update -qq
apt-get install -qq -y --no-install-recommends g++ make curl ca-certificates xz-utils \
    libbz2-dev libffi-dev liblzma-dev libreadline-dev libsqlite3-dev libssl-dev zlib1g-dev

mirror=$(apt-get indextargets --format '$(REPO_URI) $(LABEL)' 'Created-By: Packages' | sed -n 's/ Debian$//p' | head -1)
release=${version%.*}
building=$(mktemp -d)
trap 'rm -rf "$building"' EXIT
cd "$building"

source=python${release}_$version.orig.tar.xz
curl --fail --silent --show-error --location --remote-name "${mirror}pool/main/p/python$release/$source"
if [ -n "$checksum" ]; then
    echo "$checksum  $source" | sha256sum --check --quiet
else
    echo "Python $version was not tested: its source is not compared with a checksum" >&2
fi
tar --extract --strip-components=1 --file "$source"

./configure --quiet --disable-gil --prefix="$prefix"
make --silent --jobs="$(nproc)"
make --silent install
"$prefix/bin/python3" -c 'import sys; print(sys.version, "with the lock" if sys._is_gil_enabled() else "without the lock")'
