"""Generated from proto/common/pb/outrider.proto by `make proto`; do not edit."""
