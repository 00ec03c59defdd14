#!/bin/sh
# Undoes install.sh. Configuration, tokens and models stay: --purge takes them along.
set -eu

root=${DESTDIR:-}
case ${1:-} in
verifier)
    [ -n "$root" ] || systemctl disable --now outrider-verifier || true
    rm -rf "$root/etc/systemd/system/outrider-verifier.service" \
        "$root/etc/systemd/system/outrider-verifier.service.d" "$root/opt/outrider"
    [ -n "$root" ] || systemctl daemon-reload
    if [ "${2:-}" = --purge ]; then
        rm -rf "$root/etc/outrider"
        for directory in lib cache; do
            rm -rf "$root/var/$directory/outrider" "$root/var/$directory/private/outrider"
        done
    fi
    ;;
edge)
    config=$root${XDG_CONFIG_HOME:-$HOME/.config}
    [ -n "$root" ] || systemctl --user disable --now outrider-edge || true
    rm -rf "$config/systemd/user/outrider-edge.service" "$config/systemd/user/outrider-edge.service.d" \
        "$root$HOME/.local/share/outrider"
    [ -n "$root" ] || systemctl --user daemon-reload
    if [ "${2:-}" = --purge ]; then
        rm -rf "$config/outrider"
    fi
    ;;
*)
    echo "usage: $0 verifier|edge [--purge]" >&2
    exit 2
    ;;
esac
