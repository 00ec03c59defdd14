#!/bin/sh
# Installs the verifier as a system service (as root), or the edge's daemon as a service of its user:
#   deploy/systemd/install.sh verifier        deploy/systemd/install.sh edge
# DESTDIR=DIR writes below DIR and starts nothing; PYTHON names the interpreter; WHAT=- installs no packages.
# Undo: deploy/systemd/uninstall.sh verifier | edge
set -eu

here=$(cd "$(dirname "$0")" && pwd)
source=${WHAT:-$(cd "$here/../.." && pwd)}
python=${PYTHON:-python3}
root=${DESTDIR:-}

packages() { # prefix, extras
    [ "$source" = - ] && return
    [ -x "$1/bin/python" ] || "$python" -m venv "$1"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$here/../../constraints.txt" "$source[$2]" # the versions that the tests passed with
}

keep() { # a file that the operator may have changed
    [ -e "$2" ] || install -D -m 644 "$1" "$2"
}

case ${1:-} in
verifier)
    units=$root/etc/systemd/system
    packages "$root/opt/outrider" cloud,edge,structured
    install -D -m 644 "$here/outrider-verifier.service" "$units/outrider-verifier.service"
    for name in tls gpu; do
        example=outrider-verifier.service.d/$name.conf.example
        install -D -m 644 "$here/$example" "$units/$example"
    done
    keep "$here/verifier.yaml" "$root/etc/outrider/verifier.yaml"
    [ -n "$root" ] || systemctl daemon-reload
    echo "installed; start it: systemctl enable --now outrider-verifier; look: journalctl -u outrider-verifier"
    ;;
edge)
    units=$root${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user
    packages "$root$HOME/.local/share/outrider" daemon,structured
    install -D -m 644 "$here/outrider-edge.service" "$units/outrider-edge.service"
    install -D -m 644 "$here/outrider-edge.service.d/sandbox.conf.example" \
        "$units/outrider-edge.service.d/sandbox.conf.example"
    # A package cannot know the machine it is for; elsewhere the sandbox is on wherever it can be.
    if [ -z "$root" ] && unshare --user --mount true 2>/dev/null; then
        keep "$here/outrider-edge.service.d/sandbox.conf.example" "$units/outrider-edge.service.d/sandbox.conf"
    fi
    keep "$here/edge.yaml" "$root${XDG_CONFIG_HOME:-$HOME/.config}/outrider/edge.yaml"
    [ -n "$root" ] || systemctl --user daemon-reload
    echo "installed; start it: systemctl --user enable --now outrider-edge"
    ;;
*)
    echo "usage: $0 verifier|edge" >&2
    exit 2
    ;;
esac
